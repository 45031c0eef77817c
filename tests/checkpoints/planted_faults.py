"""Faults of a converter, planted: what each would do if isoloss made it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from isoloss.models.conversion import mcore_to_hf
from isoloss.models.kinds.mappings import QKV, GatedMLP
from isoloss.models.kinds.weight import Part, Weight
from isoloss.models.rope import Rope
from isoloss.models.weights import checkpoint_read, hf_checkpoint
from isoloss.models.weights.weight_map import weight_map
from isoloss.tools.convert import verify_tensors


def plain_qkv() -> contextlib.AbstractContextManager:
    """q, k and v one below the other, instead of by kv head."""

    def split(self: QKV, whole: Tensor) -> tuple[Tensor, ...]:
        d = self.head_dim
        return whole.split([self.num_heads * d, self.num_kv_heads * d, self.num_kv_heads * d])

    return _patched(
        QKV,
        split=split,
        merge=lambda self, tensors: torch.cat(list(tensors)),
    )


def gate_for_up() -> contextlib.AbstractContextManager:
    return _patched(
        GatedMLP,
        split=lambda self, whole: whole.chunk(2, 0)[::-1],
        merge=lambda self, tensors: torch.cat(list(tensors)[::-1]),
    )


def experts_exchanged() -> contextlib.AbstractContextManager:
    return _weight_map(lambda weight: _of_expert(weight, {0: 1, 1: 0}) if weight.layer == 2 else weight)


def expert_misnamed() -> contextlib.AbstractContextManager:
    right, wrong = "layers.2.mlp.experts.1.", "layers.2.mlp.expert.1."

    def change(weight: Weight) -> Weight:
        parts = (replace(part, tensor=part.tensor.replace(right, wrong)) for part in weight.parts)
        return replace(weight, parts=tuple(parts))

    return _weight_map(change)


def padding_leaked() -> contextlib.AbstractContextManager:
    """One row more than the vocabulary has."""

    def change(weight: Weight) -> Weight:
        if weight.name not in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return weight
        shape = (weight.shape[0] + 1, *weight.shape[1:])
        return replace(weight, shape=shape, parts=(Part(weight.parts[0].tensor, shape),))

    return _weight_map(change, checkpoint_read)


def tensor_missing() -> contextlib.AbstractContextManager:
    return _weight_map(lambda weight: None if weight.name.endswith("layers.1.mlp.linear_fc2.weight") else weight)


def wrong_shape() -> contextlib.AbstractContextManager:
    """A matrix that is not square, its shape the other way round: the same number of bytes."""

    def change(weight: Weight) -> Weight:
        if not weight.name.endswith("self_attention.linear_proj.weight"):
            return weight
        return replace(weight, parts=(replace(weight.parts[0], shape=weight.parts[0].shape[::-1]),))

    return _weight_map(change)


def rope_scaling_ignored() -> contextlib.AbstractContextManager:
    plain = Rope.inv_freq
    return _patched(Rope, inv_freq=lambda self, rotary_dim: plain(replace(self, scaling=None), rotary_dim))


def _of_expert(weight: Weight, other: Mapping[int, int]) -> Weight:
    """The weight, made of the Hugging Face tensors of another expert."""
    if weight.expert not in other:
        return weight
    here, there = f".experts.{weight.expert}.", f".experts.{other[weight.expert]}."
    parts = (replace(part, tensor=part.tensor.replace(here, there)) for part in weight.parts)
    return replace(weight, parts=tuple(parts))


@contextlib.contextmanager
def _patched(owner: type, **methods: Callable) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(owner, name, method))
        yield


@contextlib.contextmanager
def _weight_map(change: Callable[[Weight], Weight | None], *modules: ModuleType) -> Iterator[None]:
    """The map as the conversion and the comparison of tensors see it; the model that computes logits keeps its own."""

    def changed(arch) -> tuple[Weight, ...]:
        return tuple(found for weight in weight_map(arch) if (found := change(weight)) is not None)

    with contextlib.ExitStack() as stack:
        for module in (mcore_to_hf, hf_checkpoint, verify_tensors, *modules):
            stack.enter_context(mock.patch.object(module, "weight_map", changed))
        yield
