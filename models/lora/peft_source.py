"""The factors of a PEFT folder as a source of an adapter's weights, and the keys under which they can be trained."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.weight import Part, Weight
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapted_weights, leaves, linears
from isoloss.models.lora.peft_reader import AdapterFolder, Pair
from isoloss.parallel.runtime.errors import UserError

_CLOSE = 1e-9  # relative; alpha = scale * sqrt(rank) is rounded


class FolderFactors:
    """A source of the factors in an adapter's folder, in the types of its file."""

    def __init__(self, adapter: AdapterFolder):
        self._adapter = adapter

    def whole(self, weight: Weight) -> Tensor:
        letter = weight.name[-1]
        return weight.mapping.merge([self._adapter.factor(_place(part), letter) for part in weight.parts])


def initial_factors(folder: str, arch: Architecture, lora: LoraConfig) -> FolderFactors:
    """Return the factors of lora.init. Raises UserError where the folder is not an adapter of this model, or the keys
    of `lora` mean another one."""
    adapter = AdapterFolder(Path(folder), arch)
    _check_agrees(folder, adapter, arch, lora)
    return FolderFactors(adapter)


def keys_of(adapter: AdapterFolder, arch: Architecture) -> LoraConfig:
    """Return the keys under which an adapter can be trained on. Raises UserError where none mean it."""
    adapted = list(_adapted(adapter, arch))
    targets = targets_of(arch, [weight for weight, _ in adapted])
    if targets is None:
        raise UserError(
            f"{adapter.path} adapts some layers and not others, which lora.targets cannot say: merge it into the model "
            "by isoloss-convert merge, and train a new one"
        )
    ranks = {expert: {pair.a.shape[0] for weight, pair in adapted if (weight.expert is not None) is expert}
             for expert in (False, True)}  # fmt: skip
    for expert, found in ranks.items():
        if len(found) > 1:
            key = "lora.expert_rank" if expert else "lora.rank"
            raise UserError(
                f"{adapter.path} has adapters of ranks {', '.join(map(str, sorted(found)))}, and {key} is one for all: "
                "merge it into the model by isoloss-convert merge, and train a new one"
            )
    rank = next(iter(ranks[False] or ranks[True]))
    expert_rank = next(iter(ranks[True] - {rank}), None)
    scales = {pair.a.shape[0]: pair.scale for _, pair in adapted}
    roots = ("sqrt-rank", "rank") if adapter.config.root else ("rank", "sqrt-rank")
    for scaling in roots:
        alpha = LoraConfig(rank=rank, alpha=scales[rank], scaling=scaling).scale(rank)
        alpha = _short(scales[rank] * scales[rank] / alpha)
        lora = LoraConfig(rank=rank, alpha=alpha, scaling=scaling, targets=targets, expert_rank=expert_rank)
        if all(_close(lora.scale(pair.a.shape[0]), pair.scale) for _, pair in adapted):
            return lora
    found = sorted({pair.scale for _, pair in adapted})
    raise UserError(
        f"{adapter.path} has products of scales {', '.join(f'{scale:.6g}' for scale in found)}, "
        "which one lora.alpha cannot say: merge it into the model by isoloss-convert merge, and train a new one"
    )


def targets_of(arch: Architecture, adapted: Iterable[Weight]) -> tuple[str, ...] | None:
    """Return lora.targets that mean these weights, or None if no value does."""
    wanted = {weight.name for weight in adapted}
    every = [(weight, groups) for weight, groups in linears(arch)]
    groups = [name for name in ("all", "attention", "mlp", "experts")
              if (members := {weight.name for weight, of in every if name in of}) and members <= wanted]  # fmt: skip
    if "all" in groups:
        rest = [leaf for weight, of in every if weight.name in wanted and "all" not in of for leaf in leaves(weight)]
        return ("all", *rest)
    names = dict[str, bool]()
    for weight, _ in every:
        for leaf in leaves(weight):
            names[leaf] = names.get(leaf, True) and weight.name in wanted
    by_name = tuple(leaf for leaf, everywhere in names.items() if everywhere)
    for targets in (by_name, (*by_name, *groups)):
        if targets and {weight.name for weight in adapted_weights(arch, targets)} == wanted:
            return targets
    return None


def _adapted(adapter: AdapterFolder, arch: Architecture) -> Iterable[tuple[Weight, Pair]]:
    """Yield the weights that are adapted as a whole, with the pair of each of their tensors."""
    rest = set(adapter.pairs)
    for weight, _ in linears(arch):
        places = [(part.tensor, part.row) for part in weight.parts]
        has = [place in rest for place in places]
        if any(has) and not all(has):
            lacking = ", ".join(leaf for leaf, there in zip(leaves(weight), has) if not there)
            raise UserError(
                f"{adapter.path} adapts a part of {', '.join(leaves(weight))}, which Megatron-Core multiplies as one "
                f"matrix, and not {lacking}: merge it into the model by isoloss-convert merge, and train a new one"
            )
        for place in places if all(has) else ():
            rest.remove(place)
            yield weight, adapter.pairs[place]
    if rest:
        raise UserError(
            f"{adapter.path} adapts {min(place[0] for place in rest)}, for which isoloss trains no adapter: merge it "
            "into the model by isoloss-convert merge, and train a new one"
        )


def _check_agrees(folder: str, adapter: AdapterFolder, arch: Architecture, lora: LoraConfig) -> None:
    """Raise UserError unless the keys mean the folder's adapter: what is set, and what is at its default, too."""
    wanted = keys_of(adapter, arch)
    said = f"the adapter of lora.init={folder}"
    if lora.rank != wanted.rank:
        raise UserError(f"lora.rank={lora.rank}, and {said} has rank {wanted.rank}: set lora.rank={wanted.rank}")
    ours, theirs = ({weight.name for weight in adapted_weights(arch, each.targets)} for each in (lora, wanted))
    if ours != theirs:
        targets = f"[{','.join(wanted.targets)}]"
        raise UserError(
            f"lora.targets=[{','.join(lora.targets)}], and {said} adapts other matrices: set lora.targets={targets}"
        )
    value = wanted.rank_of(expert=True)
    if lora.rank_of(expert=True) != value and any(weight.expert is not None for weight, _ in _adapted(adapter, arch)):
        raise UserError(
            f"lora.expert_rank={'null' if lora.expert_rank is None else lora.expert_rank}, and {said} has rank {value} "
            f"for experts: set lora.expert_rank={value}"
        )
    for rank in {pair.a.shape[0] for pair in adapter.pairs.values()}:
        if not _close(lora.scale(rank), wanted.scale(rank)):
            raise UserError(
                f"lora.alpha={lora.alpha} with lora.scaling={lora.scaling} multiplies by {lora.scale(rank):.6g}, and "
                f"{said} was trained with {wanted.scale(rank):.6g}: set lora.alpha={wanted.alpha:.12g} and "
                f"lora.scaling={wanted.scaling}"
            )


def _place(part: Part) -> tuple[str, int | None]:
    """Return the place of the matrix that a factor is for. A tensor of all experts has no `.weight` in its name."""
    module = part.tensor.removesuffix(".weight").rsplit(".lora_", 1)[0]
    return (module if part.row is not None else f"{module}.weight"), part.row


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _CLOSE * abs(other)


def _short(alpha: float) -> float:
    """Return a number without the last digits, which rounding made."""
    return float(f"{alpha:.12g}")
