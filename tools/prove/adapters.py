"""Compute what an adapter is proved against: the model with merged weights W + s B A, trained as a whole on one rank.

Its gradient G gives those of the factors by the chain rule: s B^T G and s G A^T. It knows neither the products of
adapted layers nor their scale, so a proof also finds what is the same on every layout.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.weight import Weight
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import Factors, adapter_map, is_turned
from isoloss.models.lora.initial import InitialFactors
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.tools.prove.bugs.bug import AdapterTraits


class RandomFactors(InitialFactors):
    """Random factors: with B = 0, as at the start of training, the gradient of A is 0, whatever is wrong. Whatever its
    scale, an adapter changes the model as much as its weights do: more would magnify rounding."""

    def __init__(self, config: Config):
        super().__init__(config.train.seed if config.lora.seed is None else config.lora.seed, random_b=True)
        self._alpha = config.lora.alpha

    def whole(self, weight: Weight) -> Tensor:
        values = super().whole(weight)
        return values / self._alpha if weight.name.endswith(".lora_B") else values


def adapted_engine(config: Config) -> Engine:
    """Build an engine; its adapter, if it has one, with `RandomFactors`."""
    engine = Engine(config)
    if engine.trained.adapter is not None:
        engine.trained.adapter.load(RandomFactors(config))
    return engine


def loss_of_base(engine: Engine, samples: Sequence[Sample], loss: Loss) -> float:
    """Return the loss of the model without the adapter."""
    assert engine.trained.adapter is not None
    with engine.trained.adapter.off():
        return engine.evaluate(samples, loss).loss


class MergedModel:
    """A model with merged weights, trained as a whole on one rank. Also the source of its weights, in fp64."""

    def __init__(self, config: Config):
        self.engine = Engine(replace(config, lora=LoraConfig()))
        self._lora, self._factors = config.lora, RandomFactors(config)
        self._of_weight = {each.base.name: each for each in adapter_map(self.engine.arch, config.lora)}
        self._source: WeightSource = self.engine.source.weights
        self.engine.model.load(self)

    def whole(self, weight: Weight) -> Tensor:
        base, factors = self._source.whole(weight), self._of_weight.get(weight.name)
        if factors is None:
            return base
        scale, turned = self._scale(factors), is_turned(weight.mapping)
        deltas = [scale * b @ a for a, b in self._pairs(factors)]
        return base.double() + weight.mapping.merge([delta.T if turned else delta for delta in deltas])

    def loss_of_base(self, samples: Sequence[Sample], loss: Loss) -> float:
        """Return the loss of the model without the adapter."""
        self.engine.model.load(self._source)
        base = self.engine.evaluate(samples, loss).loss
        self.engine.model.load(self)
        return base

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole gradients of the factors, in fp64, after `forward_backward`."""
        for name, gradient in self.engine.gradients():
            factors = self._of_weight.get(name)
            if factors is not None:
                yield from self._of_factors(factors, gradient.double())

    def _of_factors(self, factors: Factors, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
        scale, of_a, of_b = self._scale(factors), [], []
        of_parts = factors.base.mapping.split(gradient)
        for (a, b), of_part in zip(self._pairs(factors), of_parts, strict=True):
            of_delta = of_part.T if is_turned(factors.base.mapping) else of_part
            of_a.append(scale * b.to(of_delta).T @ of_delta)
            of_b.append(scale * of_delta @ a.to(of_delta).T)
        yield factors.a.name, factors.a.mapping.merge(of_a)
        yield factors.b.name, factors.b.mapping.merge(of_b)

    def _pairs(self, factors: Factors) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the factors A and B of every Hugging Face tensor of a weight, fp64."""
        split = [weight.mapping.split(self._factors.whole(weight).double()) for weight in (factors.a, factors.b)]
        return zip(*split, strict=True)

    def _scale(self, factors: Factors) -> float:
        rank = factors.b.shape[1]
        return self._lora.alpha / (math.sqrt(rank) if self._lora.scaling == "sqrt-rank" else rank)


def norm_of(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def adapter_traits(config: Config, arch: Architecture) -> AdapterTraits | None:
    """Return the traits of the configured adapter by which a planted bug shows; None without one."""
    if config.lora.rank == 0:
        return None
    factors = adapter_map(arch, config.lora)
    rows = [each.part_of_rows(1, 0) for each in factors]
    return AdapterTraits(
        frozenset((each.base.expert is not None, _division(each)) for each in factors),
        merges=any(len(each.base.parts) > 1 for each in factors),
        alternates=any(bool((part_O.diff() < 0).any()) for part_O in rows),
        scaled=any(each.rank > 1 for each in factors),
        recomputed=config.memory.recompute == "full",
    )


def _division(factors: Factors) -> str:
    """Return what TP does with a weight."""
    return "copied" if factors.replicated else "rows" if factors.row_parallel else "columns"
