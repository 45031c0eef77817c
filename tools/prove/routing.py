"""Record which experts each token chose under one layout, and by which margin, and compare them under another.

A router is a step function: where rounding decides between two experts, the gradient jumps, and no tolerance covers it.
So choices are compared one by one, and a token that chose otherwise is reported, never averaged.

Shape suffixes: O tokens of the step, Z tokens that a router sees, E experts.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn

from isoloss.models.mcore.moe.router import Router, routers, selection_margin
from isoloss.models.mcore.moe.router_losses import RoutedTokens


@dataclass(frozen=True)
class Choices:
    """The choices of a layer, by the tokens' place in the step.

    seen_O: True for the tokens that this rank saw; the others have chosen_OE False and an infinite margin.
    chosen_OE: True for the experts that a token chose. margin_O: see `selection_margin`.
    """

    seen_O: Tensor
    chosen_OE: Tensor
    margin_O: Tensor

    @classmethod
    def none(cls, tokens: int, experts: int) -> "Choices":
        return cls(
            torch.zeros(tokens, dtype=torch.bool),
            torch.zeros((tokens, experts), dtype=torch.bool),
            torch.full((tokens,), torch.inf, dtype=torch.float64),
        )


@dataclass(frozen=True)
class LayerRouting:
    """The comparison of a layer with experts.

    tokens: number of tokens seen. margin: the smallest margin among them. flips: number of tokens that chose other
    experts than in the reference. flip_margin: the smallest margin of those in the reference; infinite without any.
    """

    tokens: int
    margin: float
    flips: int
    flip_margin: float


@contextlib.contextmanager
def recorded(chunks: Sequence[nn.Module], tokens: int) -> Iterator[dict[int, Choices]]:
    """Record the choices of this rank's routers in every pass, by layer. tokens: number of tokens of the step."""
    choices: dict[int, Choices] = {}

    @torch.no_grad()
    def record(router: Router, inputs: tuple[Tensor, RoutedTokens], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        (hidden, seen), (_, chosen_ZE, _) = inputs, outputs
        layer_choices = choices.setdefault(router.layer, Choices.none(tokens, router.experts.count))
        margin_Z = selection_margin(router.logits(hidden), router.experts, router.expert_bias)
        for members_P, start in zip(seen.members_SP, seen.start_S):
            of_sample_Z = seen.of_pieces(members_P) > 0
            origin = (start + seen.position_Z[of_sample_Z]).cpu()
            layer_choices.seen_O[origin] = True
            layer_choices.chosen_OE[origin] = chosen_ZE[of_sample_Z].cpu()
            layer_choices.margin_O[origin] = margin_Z[of_sample_Z].to("cpu", torch.float64)

    with contextlib.ExitStack() as stack:
        for router in routers(chunks):
            stack.callback(router.register_forward_hook(record).remove)
        yield choices


def as_tensors(choices: Mapping[int, Choices]) -> dict[str, Tensor]:
    """Return the tensors of a reference file."""
    chosen = {_name(layer, "chosen"): layer_choices.chosen_OE for layer, layer_choices in choices.items()}
    return chosen | {_name(layer, "margin"): layer_choices.margin_O for layer, layer_choices in choices.items()}


def compare_choices(choices: Mapping[int, Choices], reference: str) -> dict[int, LayerRouting]:
    """Compare this rank's choices with those of a reference file, by layer."""
    compared = {}
    with safe_open(reference, "pt") as file:
        for layer, layer_choices in choices.items():
            expected_OE = file.get_tensor(_name(layer, "chosen"))
            flipped_O = layer_choices.seen_O & (layer_choices.chosen_OE != expected_OE).any(1)
            margins = file.get_tensor(_name(layer, "margin"))[flipped_O]
            compared[layer] = LayerRouting(
                int(layer_choices.seen_O.sum()), _smallest(layer_choices.margin_O), len(margins), _smallest(margins)
            )
    return compared


def merge_routing(per_rank: Sequence[Mapping[int, LayerRouting]]) -> dict[int, LayerRouting]:
    """Merge the comparisons of all ranks of a world, each of which saw other tokens."""
    merged: dict[int, LayerRouting] = {}
    for layer in sorted({layer for routing in per_rank for layer in routing}):
        parts = [routing[layer] for routing in per_rank if layer in routing]
        merged[layer] = LayerRouting(
            sum(part.tokens for part in parts),
            min(part.margin for part in parts),
            sum(part.flips for part in parts),
            min(part.flip_margin for part in parts),
        )
    return merged


def routing_faults(measured: Mapping[int, LayerRouting], reference: Mapping[int, LayerRouting]) -> list[str]:
    """Return a line for each fault in the choices of a world."""
    faults = []
    for layer, expected in reference.items():
        ours = measured.get(layer)
        if ours is None or ours.tokens != expected.tokens:
            seen = 0 if ours is None else ours.tokens
            faults.append(f"routing: layer {layer} chose experts for {seen} tokens, not {expected.tokens}")
        elif ours.flips:
            faults.append(f"routing flip: layer {layer}, {ours.flips} tokens, smallest margin {ours.flip_margin:.1e}")
    return faults


def _name(layer: int, what: str) -> str:
    return f"routing.{layer}.{what}"


def _smallest(margins: Tensor) -> float:
    return min(margins.tolist(), default=math.inf)
