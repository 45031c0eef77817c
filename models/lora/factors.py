"""The adapter map: for every adapted weight of a model its two factors, as weights with mappings of their own.

The factors of a Hugging Face tensor W [out, in] are A [r, in] and B [out, r]: W + scale * B A is what the model
multiplies by. A Megatron-Core weight that merges P tensors has the P factors A one below the other, [P*r, in], and one
B, [out, r], whose rows are merged as those of the weight are: its mapping merges, shards, unshards and splits them. So
a row of B goes with the A of the tensor that the row came from.

One factor is split over TP as the weight is; every rank has the other whole, and computes a part of its gradient.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.mappings import (
    InterleavedGatedMLP,
    ParamMapping,
    Replicated,
    RowParallel,
    TransposedRowParallel,
)
from isoloss.models.kinds.weight import Part, Weight
from isoloss.models.lora.config import GROUPS, LoraConfig
from isoloss.models.weights.weight_map import OUTPUT, output_matrix, weight_map
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class Stacked(Replicated):
    """Matrices one below the other, the same on every rank. count: their number."""

    count: int

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), 0)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.chunk(self.count, 0)


@dataclass(frozen=True)
class Turned:
    """The mapping of a weight that Hugging Face stores as [in, out], for factors, which PEFT stores as [out, r]."""

    of_weight: ParamMapping

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.of_weight.merge([tensor.T for tensor in tensors])

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.T for tensor in self.of_weight.split(whole))

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        return self.of_weight.shard(whole, tp_size, tp_rank)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return self.of_weight.unshard(shards)


@dataclass(frozen=True)
class Factors:
    """The adapter of a weight.

    base: the weight.
    a, b: the factors [P*r, in] and [out, r].
    scale: factor of the product.
    """

    base: Weight
    a: Weight
    b: Weight
    scale: float

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    @cached_property
    def row_parallel(self) -> bool:
        """Return whether TP splits the inputs of the weight: then A is split and B is whole, else the reverse."""
        return isinstance(self.base.mapping, RowParallel)

    @property
    def of_output(self) -> bool:
        """Return whether the weight is the output matrix, which the loss head multiplies by."""
        return self.base.name == OUTPUT

    @cached_property
    def replicated(self) -> bool:
        """Return whether every TP rank has the whole weight, and both factors."""
        return isinstance(self.base.mapping, Replicated)

    def part_of_rows(self, tp_size: int, tp_rank: int) -> Tensor:
        """Return for each row of this rank's B the number of its Hugging Face tensor, int64 [out / tp]."""
        rows = [torch.full((part.shape[0], 1), number, device="cpu") for number, part in enumerate(self.b.parts)]
        whole = self.b.mapping.merge(rows)
        return self.b.mapping.shard(whole, tp_size, tp_rank).flatten()


def adapter_map(arch: Architecture, lora: LoraConfig) -> tuple[Factors, ...]:
    """Return the factors of every adapted weight, in model order.

    Raises UserError for a target that the model does not have, and for some tensors of a merged weight without the
    others.
    """
    return tuple(factors_of(weight, lora) for weight in adapted_weights(arch, lora.targets))


def factor_weights(arch: Architecture, lora: LoraConfig) -> tuple[Weight, ...]:
    """Return both factors of every adapted weight, in the order of `adapter_map`. Raises UserError as that."""
    return tuple(weight for factors in adapter_map(arch, lora) for weight in (factors.a, factors.b))


def num_factors(arch: Architecture, lora: LoraConfig) -> int:
    """Return the number of numbers in an adapter of the whole model."""
    return sum(prod(factor.shape) for factor in factor_weights(arch, lora))


def adapted_weights(arch: Architecture, targets: Sequence[str]) -> tuple[Weight, ...]:
    """Return the weights that `targets` (lora.targets) names. Raises UserError as `adapter_map`."""
    found = list(linears(arch))
    groups = [target for target in targets if target in GROUPS]
    names = [target for target in targets if target not in GROUPS]
    known = list(dict.fromkeys(leaf for weight, _ in found for leaf in leaves(weight)))
    for name in names:
        if name not in known:
            raise UserError(
                f"lora.targets names {name!r}, which this model has no matrix for: use some of {', '.join(known)}, or "
                f"{', '.join(GROUPS)}"
            )
    chosen = []
    for weight, groups_of_weight in found:
        mine = [leaf in names for leaf in leaves(weight)]
        if groups_of_weight.intersection(groups) or all(mine):
            chosen.append(weight)
        elif any(mine):
            lacking = [leaf for leaf, named in zip(leaves(weight), mine) if not named]
            raise UserError(
                f"lora.targets={list(targets)} names a part of {', '.join(leaves(weight))}, which Megatron-Core "
                f"multiplies as one matrix: add {', '.join(lacking)}"
            )
    if not chosen:
        raise UserError(f"lora.targets={list(targets)} names nothing that this model has; use all")
    return tuple(chosen)


def trained_weights(arch: Architecture, lora: LoraConfig) -> tuple[Weight, ...]:
    """Return the weights that are trained: the factors of an adapter, or without one the model's own."""
    return factor_weights(arch, lora) if lora.rank > 0 else tuple(weight_map(arch))


def present(arch: Architecture, targets: Sequence[str]) -> tuple[str, ...]:
    """Return those of `targets` that name a matrix of this model, such as a part of a larger one."""
    known = {name for weight, groups in linears(arch) for name in (*leaves(weight), *groups)}
    return tuple(target for target in targets if target in known)


def leaves(weight: Weight) -> list[str]:
    """Return the last names of a weight's Hugging Face modules, such as q_proj, k_proj and v_proj."""
    return [_module(part).rsplit(".", 1)[-1] for part in weight.parts]


def linears(arch: Architecture) -> Iterator[tuple[Weight, set[str]]]:
    """Yield the weights that an adapter can target, with the names in GROUPS that include them."""
    for weight in weight_map(arch):
        if weight.layer is None or not weight.name.endswith(".weight"):
            continue
        layer = arch.layers[weight.layer]
        name = weight.name.removeprefix(f"decoder.layers.{weight.layer}.").removesuffix(".weight")
        name = re.sub(r"local_experts\.\d+", "local_experts", name)
        if name in layer.attention.linears():
            yield weight, {"all", "attention"}
        elif name in layer.mlp.linears():
            yield weight, {"all", "mlp"} | ({"experts"} if weight.expert is not None else set())
    if not arch.critic:  # in no group, as PEFT's all-linear leaves it out
        yield output_matrix(arch), set()


def factors_of(base: Weight, lora: LoraConfig) -> Factors:
    rank, turned = lora.rank_of(expert=base.expert is not None), is_turned(base.mapping)
    a, b = [], []
    for part in base.parts:
        outputs, inputs = part.shape[::-1] if turned else part.shape
        a.append(replace(part, tensor=f"{_module(part)}.lora_A.weight", shape=(rank, inputs)))
        b.append(replace(part, tensor=f"{_module(part)}.lora_B.weight", shape=(outputs, rank)))
    mapping_a: ParamMapping = Stacked(len(a))
    mapping_b: ParamMapping = base.mapping
    if isinstance(base.mapping, RowParallel):
        mapping_a, mapping_b = RowParallel(), Replicated()
    elif isinstance(base.mapping, Replicated):
        mapping_a = Replicated()
    elif turned:
        mapping_b = Turned(base.mapping)
    outputs, inputs = base.shape

    def factor(letter: str, shape: tuple[int, int], parts: list[Part], mapping: ParamMapping) -> Weight:
        name = f"{base.name.removesuffix('.weight')}.lora_{letter}"
        return replace(base, name=name, shape=shape, parts=tuple(parts), mapping=mapping)

    return Factors(
        base,
        factor("A", (len(a) * rank, inputs), a, mapping_a),
        factor("B", (outputs, rank), b, mapping_b),
        lora.scale(rank),
    )


def is_turned(mapping: Any) -> bool:
    """Return whether Hugging Face stores the matrix as [in, out]."""
    return isinstance(mapping, TransposedRowParallel | InterleavedGatedMLP)


def _module(part: Part) -> str:
    """Return the name of the Hugging Face module of a tensor. A tensor of all experts is named as a module of its
    own."""
    return part.tensor.removesuffix(".weight")
