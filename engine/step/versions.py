"""Weights of an engine as they were, under numbers, for generation and log-probabilities while training goes on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoloss.engine.step.engine import Engine
from isoloss.models.lora.frozen import FrozenModel
from isoloss.parallel import UserError

BASE = 0  # the version of a model without its adapter


@dataclass(frozen=True)
class _Taken:
    """Copies of this rank's trained tensors in host memory. owner: what they belong to: a frozen model, or an engine
    that trains its own. record: what an adapter's factors are to be used with; None without adapter."""

    owner: FrozenModel | Engine
    record: Mapping[str, Any] | None
    tensors: list[Tensor]


class WeightVersions:
    """Immutable versions of what engines train: the factors of adapters, or a whole model (lora.rank=0).

    Every method is collective over the world: ranks call it in the same order.
    """

    def __init__(self):
        self._taken: dict[int, _Taken] = {}
        self._newest = BASE

    def take(self, engine: Engine) -> int:
        """Copy the present weights to host memory; the number of this version, from 1 up. Waits for the gather of
        stepped weights; may be called amid a step."""
        _refuse_borrowed(engine)
        engine.whole_model()
        self._newest += 1
        self._taken[self._newest] = _Taken(_owner(engine), _record(engine), _copies(engine))
        return self._newest

    def drop(self, version: int) -> None:
        """Free the memory of a version. Raises UserError where there is none of this number."""
        self._find(version)
        del self._taken[version]

    def restore(self, engine: Engine, version: int) -> None:
        """Give the engine the weights of a version from now on; optimizer and gradients stay.

        Raises UserError as `using`.
        """
        _refuse_borrowed(engine)
        taken = self._find(version, engine)
        engine.whole_model()
        _fill(engine, taken.tensors)

    @contextmanager
    def using(self, engine: Engine, version: int) -> Iterator[None]:
        """Let the engine compute with a version: its log-probabilities, its evaluation, and a `MegatronBackend` of it.

        Afterwards weights, optimizer and accumulated gradients are what they were, to the last bit. In between the
        engine trains, saves and loads nothing, and raises ValueError where it is asked to.

        engine: the one that the version is of, or another adapter of its model with the same rank,
            scale and targets.
        version: a number from `take`; BASE: the model without its adapter.
        Raises UserError for another number, another model or other keys of lora, and for BASE where lora.rank=0.
        """
        _refuse_borrowed(engine)
        adapter, taken = engine.trained.adapter, None
        if version != BASE:
            taken = self._find(version, engine)
        elif adapter is None:
            raise UserError("lora.rank=0: there is no model without its adapter; take() a version before training")
        engine.whole_model()
        trained = _copies(engine) if taken else []
        engine.trained.borrowed = True
        try:
            _fill(engine, taken.tensors if taken else [])
            with adapter.off() if adapter and not taken else nullcontext():
                yield
        finally:
            engine.whole_model()
            _fill(engine, trained)
            engine.trained.borrowed = False

    def _find(self, version: int, engine: Engine | None = None) -> _Taken:
        """Return a version. Raises UserError where there is none, or one of another model or other keys of lora."""
        if version not in self._taken:
            kept = ", ".join(map(str, self._taken)) or "none"
            raise UserError(f"there is no version {version}: it was dropped or never taken (there are: {kept})")
        taken = self._taken[version]
        if engine is not None and (taken.owner, taken.record) != (_owner(engine), _record(engine)):
            raise UserError(
                f"version {version} is of another model, or of an adapter with other lora.* keys: use the engine "
                "that it was taken of"
            )
        return taken


def _owner(engine: Engine) -> FrozenModel | Engine:
    return engine.trained.adapter.frozen if engine.trained.adapter else engine


def _record(engine: Engine) -> Mapping[str, Any] | None:
    """Return rank, scale and targets of the adapter, without the digest, which is known after the first checkpoint."""
    adapter = engine.trained.adapter
    return {**adapter.adapter_record, "base": ""} if adapter else None


def _copies(engine: Engine) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in engine.trained.tensors()]


@torch.no_grad()
def _fill(engine: Engine, values: list[Tensor]) -> None:
    """Give the trained tensors these values; none: leave them as they are."""
    for tensor, value in zip(engine.trained.tensors() if values else [], values, strict=True):
        tensor.copy_(value)


def _refuse_borrowed(engine: Engine) -> None:
    if engine.trained.borrowed:
        raise ValueError("the engine computes with another version of its weights: leave `using` first")
