"""The nouns of a training step.

Shape suffixes: T tokens of one sample, K targets of a position, L layers with experts, X experts chosen for a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isoloss.parallel import UserError

UNKNOWN = -1  # in Sample.routes


@dataclass(frozen=True)
class Sample:
    """Tokens that the model reads at once: never split, padded or shifted before `packing`.

    tokens_T: int64 token ids.
    mask_T: bool; True where a target is predicted from the tokens before position t. mask_T[0] is False: the first
        token has nothing before it.
    group: number of its prompt; any, the same for all samples of a prompt (prompt means, shared prefixes).
    fields: further per-token float tensors of shape [T] that a loss reads (advantages, old log-probabilities ...), or
        [T, K] like targets_T; fields[k][t] belongs to the prediction *at* position t, like mask_T.
    id: origin of the sample, such as "file:line" of its row; nothing is computed from it.
    sequence: number of its trajectory, the sequence of loss.aggregation; any, the same for all samples that one
        trajectory is cut into, each of its targets being a target of one of them. None: the sample is a whole one.
    set: number of its pair or ranking; any, the same for all samples of a set. None: it belongs to none.
    targets_T: int64 token ids to predict, targets_T[t] from the tokens before position t; read where mask_T is True.
        None: tokens_T. Of shape [T, K] for K targets of each position, some of which may be the same, as in the
        distillation of a teacher's K likeliest tokens.
    owned_T: bool; tokens that this sample counts for, where it is one of several of a trajectory, which repeat tokens:
        each token of the trajectory's tree is owned by one of them (`prefixes.with_owned_tokens` finds that). Losses of
        routers, selection biases and loads of experts count owned tokens. None: all.
    routes: uint8 or int16 of shape [T, L, X]: the experts that a sampler chose for token t as an input, which the
        trainer's routers choose again. A row of -1 (in uint8: of 255) is not known, and chosen live. None: all are.
    """

    tokens_T: Tensor
    mask_T: Tensor
    group: int = 0
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    id: str = ""
    sequence: int | None = None
    set: int | None = None
    targets_T: Tensor | None = None
    owned_T: Tensor | None = None
    routes: Tensor | None = None

    def __post_init__(self):
        if not (isinstance(self.tokens_T, Tensor) and isinstance(self.mask_T, Tensor)):
            name = "mask_T" if isinstance(self.tokens_T, Tensor) else "tokens_T"
            raise ValueError(f"{name} is a {type(getattr(self, name)).__name__}: make it a tensor by torch.tensor")
        if self.tokens_T.ndim != 1 or self.tokens_T.numel() == 0 or self.tokens_T.dtype != torch.int64:
            raise ValueError(
                f"tokens_T must be a non-empty int64 vector, not {self.tokens_T.dtype} {tuple(self.tokens_T.shape)}"
            )
        if self.mask_T.shape != self.tokens_T.shape or self.mask_T.dtype != torch.bool:
            raise ValueError(
                f"mask_T must be bool of shape {tuple(self.tokens_T.shape)}, not {self.mask_T.dtype} "
                f"{tuple(self.mask_T.shape)}"
            )
        if not self.mask_T.is_meta and bool(self.mask_T[0]):
            raise ValueError("mask_T[0] must be False: the first token of a sequence is not predicted from anything")
        owned_T = self.owned_T
        if owned_T is not None and (owned_T.shape != self.tokens_T.shape or owned_T.dtype != torch.bool):
            raise ValueError(
                f"owned_T must be bool of shape {tuple(self.tokens_T.shape)}, not {owned_T.dtype} "
                f"{tuple(owned_T.shape)}"
            )
        shapes, targets_T = [tuple(self.tokens_T.shape)], self.targets_T
        if targets_T is not None:
            several = targets_T.ndim == 2 and len(targets_T) == len(self.tokens_T) and targets_T.shape[1] > 0
            if not (several or targets_T.shape == shapes[0]) or targets_T.dtype != torch.int64:
                raise ValueError(
                    f"targets_T must be int64 of shape {shapes[0]} or ({len(self)}, K), not {targets_T.dtype} "
                    f"{tuple(targets_T.shape)}"
                )
            shapes += [tuple(targets_T.shape)] if several else []
        for name, values in self.fields.items():
            if not isinstance(values, Tensor) or tuple(values.shape) not in shapes:
                found = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
                wanted = " or ".join(map(str, shapes))
                raise ValueError(f"fields[{name!r}] must be a tensor of shape {wanted}, not {found}")
        routes = self.routes
        if routes is not None and (
            routes.dtype not in (torch.uint8, torch.int16) or routes.ndim != 3 or len(routes) != len(self)
        ):
            raise ValueError(
                f"routes must be uint8 or int16 of shape ({len(self)}, layers with experts, experts of a token), not "
                f"{routes.dtype} {tuple(routes.shape)}"
            )

    def __len__(self) -> int:
        return self.tokens_T.numel()

    @property
    def predicted_T(self) -> Tensor:
        """Return the token ids that are predicted where mask_T is True."""
        return self.tokens_T if self.targets_T is None else self.targets_T

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Return the shape of the targets of a position: () for one, (K,) for K."""
        return tuple(self.predicted_T.shape[1:])

    def values(self) -> tuple:
        """Return plain containers and tensors from which `Sample(*values)` makes the sample again."""
        ids = self.id, self.sequence, self.set
        own = self.targets_T, self.owned_T, self.routes
        return self.tokens_T, self.mask_T, self.group, dict(self.fields), *ids, *own


def outline(sample: Sample) -> Sample:
    """Return the sample with its tensors on torch's meta device, without contents; numbers and id are kept."""
    fields = {name: values_T.to("meta") for name, values_T in sample.fields.items()}
    own = {name: getattr(sample, name) for name in ("targets_T", "owned_T", "routes")}
    own = {name: None if tensor is None else tensor.to("meta") for name, tensor in own.items()}
    tokens_T, mask_T = sample.tokens_T.to("meta"), sample.mask_T.to("meta")
    return replace(sample, tokens_T=tokens_T, mask_T=mask_T, fields=fields, **own)


def target_shape(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Return the shape of the targets of a position in all samples of a step. samples: outlines are enough.

    Raises UserError where samples, or one of their fields, have other numbers of targets a position than the first.
    """
    if not samples:
        return ()
    first = samples[0]
    for sample in samples:
        pairs = [("targets_T", first.predicted_T, sample.predicted_T)]
        pairs += [(f"fields[{name!r}]", each, sample.fields.get(name, each)) for name, each in first.fields.items()]
        for name, one, other in pairs:
            if one.shape[1:] != other.shape[1:]:
                shapes = ["[" + ", ".join(["T", *map(str, each.shape[1:])]) + "]" for each in (one, other)]
                raise UserError(
                    f"{name} is {shapes[0]} in sample {first.id!r} and {shapes[1]} in sample {sample.id!r}: a step "
                    "has one number of targets a position; pad with weights of 0, or split the step"
                )
    return first.target_shape


def sequence_numbers(samples: Sequence[Sample]) -> list[int]:
    """Number the trajectory of each sample from 0. samples: all samples of the step, the same on every rank.

    Raises ValueError where samples of one trajectory belong to different prompts or sets.
    """
    numbers: list[int] = []
    count = 0
    firsts: dict[int, int] = {}
    for index, sample in enumerate(samples):
        first = index if sample.sequence is None else firsts.setdefault(sample.sequence, index)
        for name in ("group", "set"):
            one, other = getattr(samples[first], name), getattr(sample, name)
            if one != other:
                raise ValueError(
                    f"sequence={sample.sequence} has {name}={one} (sample {samples[first].id!r}) and {name}={other} "
                    f"(sample {sample.id!r}): give all samples of a trajectory the same {name}"
                )
        numbers.append(count if first == index else numbers[first])
        count += first == index
    return numbers


def check_tokens(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raise UserError, with the sample, if a token or a target of targets_T is no token id."""
    if samples and not _are_below(vocab_size, torch.cat([sample.tokens_T for sample in samples])):
        for number, sample in enumerate(samples):
            wrong = sample.tokens_T[(sample.tokens_T < 0) | (sample.tokens_T >= vocab_size)]
            if len(wrong):
                raise UserError(
                    f"sample {number} ({sample.id!r}) has the token {int(wrong[0])}, and the model's are 0 to "
                    f"{vocab_size - 1}: tokenize it with the model's tokenizer"
                )
    for sample in samples:
        if sample.targets_T is not None:
            targets = sample.targets_T[sample.mask_T]
            wrong = targets[(targets < 0) | (targets >= vocab_size)]
            if len(wrong):
                raise UserError(
                    f"targets_T of sample {sample.id!r} has the target {int(wrong[0])}, and the model's tokens are "
                    f"0 to {vocab_size - 1}: correct it, or set mask_T to False there"
                )


def check_routes(samples: Sequence[Sample], layers: int, experts: int, chosen: int) -> None:
    """Raise UserError, with the sample, if routes are not those of the model.

    layers: number of its layers with experts, 0 for a dense model. experts: number of experts of such a layer.
    chosen: number of experts that compute a token.
    """
    for sample in samples:
        if sample.routes is None:
            continue
        if not layers:
            raise UserError(f"sample {sample.id!r} has routes, and the model has no experts: leave Sample.routes out")
        if sample.routes.shape[1:] != (layers, chosen):
            raise UserError(
                f"routes of sample {sample.id!r} are of {sample.routes.shape[1]} layers and {sample.routes.shape[2]} "
                f"experts of a token, and the model has {layers} layers with experts that choose {chosen}: give rows "
                "of the layers with experts alone"
            )
        lowest, highest = map(int, known_routes(sample.routes).aminmax())
        if lowest < UNKNOWN or highest >= experts:
            raise UserError(
                f"routes of sample {sample.id!r} name expert {highest if highest >= experts else lowest}, and the "
                f"model's are 0 to {experts - 1}: they are another model's; -1 marks a row that is not known"
            )


def known_routes(routes: Tensor) -> Tensor:
    """Return routes as int16, `UNKNOWN` where no expert is known."""
    if routes.dtype == torch.int16:
        return routes
    return torch.where(routes == 255, UNKNOWN, routes.to(torch.int16))


def _are_below(vocab_size: int, tokens_O: Tensor) -> bool:
    lowest, highest = tokens_O.aminmax()
    return int(lowest) >= 0 and int(highest) < vocab_size


def grouped_by_prompt(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples, in their order, with a group for each prompt: the same tokens before the first target.

    A single token there is no prompt: every plain text has its first one. Such a sample is a group of its own.
    """
    groups: dict[object, int] = {}
    grouped = []
    for index, sample in enumerate(samples):
        first = int(sample.mask_T.int().argmax())
        prompt = sample.tokens_T[:first].numpy().tobytes() if first > 1 else index
        grouped.append(replace(sample, group=groups.setdefault(prompt, len(groups))))
    return grouped
