"""Measure one global batch under a layout and compare it, parameter by parameter, with a reference. Runs on every rank.

`prove` and the test suite's invariance grid share it. A measurement is a whole step up to the reduced gradient; norms
and differences are accumulated in fp64.
"""

import dataclasses
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from isoloss.engine.batching.balance import FULL, CostModel, Plan
from isoloss.engine.batching.plan import plan_step
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, LossConfig, MoeConfig
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.losses import policy_loss, value_loss
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.forward_backward import CanaryError
from isoloss.engine.step.losses import Loss, cross_entropy
from isoloss.engine.step.optimizer import global_grad_norm
from isoloss.models.architecture import Architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.weights.random_weights import RandomWeights
from isoloss.parallel import Layout
from isoloss.tools.prove.adapters import MergedModel, adapted_engine, loss_of_base, norm_of
from isoloss.tools.prove.bugs import NO_BUG, PlantedBug, RunTraits
from isoloss.tools.prove.bugs.bug import AdapterTraits, replaced
from isoloss.tools.prove.routing import (
    LayerRouting,
    as_tensors,
    compare_choices,
    merge_routing,
    recorded,
    routing_faults,
)


@dataclass(frozen=True)
class Tolerance:
    """Relative errors that rounding may cause."""

    loss: float
    gradient: float


TOLERANCE = {"fp64": Tolerance(1e-12, 1e-10), "fp32": Tolerance(1e-6, 1e-5)}


@dataclass(frozen=True)
class Case:
    """A way to run the batch: a token budget (0: everything in one micro-batch) and a loss.

    policy: the RL configuration of a policy loss, aggregated as `loss` says; None for cross-entropy.
    critic: True for that configuration's value loss on a critic instead.
    lora: keys of the adapter, which change what samples cost and so the plan.
    """

    max_tokens: int
    loss: LossConfig
    policy: RLConfig | None = None
    critic: bool = False
    lora: LoraConfig = FULL

    def build(self) -> Loss:
        if self.policy is None:
            return cross_entropy(self.loss)
        config = dataclasses.replace(self.policy, loss=self.loss)
        return value_loss(config.algorithm, config.loss) if self.critic else policy_loss(config)

    @property
    def name(self) -> str:
        if self.policy is None:
            return "cross-entropy"
        return "value" if self.critic else self.policy.algorithm.loss

    def run(
        self,
        layout: Layout,
        samples: Sequence[Sample],
        arch: Architecture,
        moe: MoeConfig | None = None,
        adapter: AdapterTraits | None = None,
    ) -> RunTraits:
        """Return the traits by which a planted bug shows. moe: the configuration of a model with experts."""
        how = layout, self._budget(samples), CostModel.of(arch, self.lora)
        plan = plan_step(samples, *how, share_prefixes=self._shares(arch))
        micro_batches = [m for rank_batches in plan.micro_batches for m in rank_batches]
        documents = tuple(tuple(len(samples[i]) for i in m) for m in micro_batches)
        targets = tuple(tuple(int(samples[i].mask_T.sum()) for i in m) for m in micro_batches)
        mode, *others = (aggregation.mode for aggregation in self.build().aggregations)
        policy = None if self.policy is None or self.critic else self.policy.algorithm
        rows = [tree for rank_trees in plan.trees for tree in rank_trees]
        children = [Counter(parent for parent in tree.parents if parent >= 0) for tree in rows]
        branches = any(max(of_row.values(), default=0) > 1 for of_row in children)
        facts = layout, documents, targets, mode, tuple(others), policy, moe
        return RunTraits(*facts, branches=branches, adapter=adapter)

    def plan(self, layout: Layout, samples: Sequence[Sample], arch: Architecture) -> Plan:
        """Return the plan of an engine with this budget."""
        how = layout, self._budget(samples), CostModel.of(arch, self.lora)
        return plan_step(samples, *how, share_prefixes=self._shares(arch))

    def _budget(self, samples: Sequence[Sample]) -> int:
        return self.max_tokens or sum(map(len, samples))

    def _shares(self, arch: Architecture) -> bool:
        return self.policy is not None and rules.shares_prefixes(self.policy)


@dataclass(frozen=True)
class Norms:
    """Squared fp64 norms of a parameter's gradient, of the reference's, and of their difference."""

    gradient: float
    reference: float
    difference: float


@dataclass(frozen=True)
class Measurement:
    """A step as one layout ran it.

    magnitude: the sum of the absolute values that the loss adds up; rounding is relative to it.
    details: every term and observed value of the loss.
    parameters: norms by the name of the weight, if there was a reference.
    routing: the choices of every layer with experts, numbered from 1.
    base: the loss of the model without its adapter; None without one.
    """

    loss: float
    magnitude: float
    details: Mapping[str, float]
    grad_norm: float
    weight_sum: float
    micro_batches: int
    canary: str | None
    parameters: Mapping[str, Norms]
    routing: Mapping[int, LayerRouting] = field(default_factory=dict)
    base: float | None = None

    @property
    def flips(self) -> int:
        """Return the number of tokens that chose other experts than in the reference, over all layers."""
        return sum(layer.flips for layer in self.routing.values())

    @property
    def smallest_margin(self) -> float | None:
        """Return the margin of the closest choice of experts; None if there was no choice."""
        margins = [layer.margin for layer in self.routing.values() if math.isfinite(layer.margin)]
        return min(margins, default=None)


def freeze(samples: Sequence[Sample]) -> bytes:
    """Return samples as bytes that any process can read (tensors sent through a pipe would share file descriptors)."""
    buffer = io.BytesIO()
    torch.save([sample.values() for sample in samples], buffer)
    return buffer.getvalue()


def thaw(frozen: bytes) -> list[Sample]:
    return [Sample(*values) for values in torch.load(io.BytesIO(frozen), weights_only=True)]


def measure(
    config: Config,
    frozen: bytes,
    cases: Sequence[Case],
    references: Sequence[str],
    bug: PlantedBug = NO_BUG,
    write: bool = False,
) -> list[Measurement]:
    """Run each case on this world.

    references: a safetensors file a case, read, or (write=True, one rank) written: of an adapter by a model with merged
        weights.

    Cases of a critic are not mixed with others; its head, which training starts at 0, is random, so that every gradient
    depends on it. Returns this rank's measurements: parameters on the first of the ranks that hold the same ones, none
    on the others.
    """
    samples = thaw(frozen)
    results = []
    canary: list[str] = []
    with bug.planted(), replaced("isoloss.engine.step.forward_backward.check_canary", _recording(canary)):
        merged = MergedModel(config) if write and config.lora.rank > 0 else None
        engine = merged.engine if merged else adapted_engine(config)
        if cases[0].critic:
            engine = Engine(config, critic_of=engine)
            engine.model.load(RandomWeights(engine.arch, config.train.seed))
        for case, reference in zip(cases, references, strict=True):
            _set_budget(engine, case, samples)
            base = None
            if config.lora.rank > 0:
                base = (merged.loss_of_base if merged else partial(loss_of_base, engine))(samples, case.build())
            canary.clear()
            engine.zero_grad()
            with recorded(engine.chunks, sum(len(sample) for sample in samples)) as choices:
                metrics = engine.forward_backward(samples, case.build())
            found = merged.gradients() if merged else engine.gradients()
            gradients = {name: gradient.to(torch.float64, copy=True) for name, gradient in found}
            if write:
                save_file({name: g.contiguous() for name, g in gradients.items()} | as_tensors(choices), reference)
            mesh = engine.mesh
            leader = (mesh.dp_context.rank() == 0 and mesh.tp.rank() == 0) or mesh.expert_dp.rank() == 0
            norms = _compare(gradients, reference) if leader else {}
            engine.optimizer.prepare_grads()
            results.append(
                Measurement(
                    metrics.loss,
                    metrics.magnitude,
                    {**metrics.terms, **metrics.observed},
                    norm_of(gradients.values()) if merged else global_grad_norm(engine.optimizer),
                    metrics.weight_sum,
                    metrics.micro_batches,
                    canary[0] if canary else None,
                    norms,
                    compare_choices(choices, reference),
                    base,
                )
            )
    return results


def merge(per_rank: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Return the measurements of a world: rank 0's numbers with the parameters and the routing of all ranks."""
    merged = []
    for measurements in zip(*per_rank):
        parameters = {name: norms for m in measurements for name, norms in m.parameters.items()}
        routing = merge_routing([m.routing for m in measurements])
        merged.append(dataclasses.replace(measurements[0], parameters=parameters, routing=routing))
    return merged


@dataclass(frozen=True)
class Comparison:
    """A measurement against its reference, in relative errors.

    base_error: error of the loss without the adapter; None without one.
    worst: the parameter with the largest gradient error.
    flips: number of tokens that chose other experts. smallest_margin: the margin of the closest choice.
    """

    loss_error: float
    norm_error: float
    gradient_error: float
    worst: str
    flips: int
    smallest_margin: float | None
    passed: bool
    reason: str
    base_error: float | None = None


def compare(measured: Measurement, reference: Measurement, tolerance: Tolerance) -> Comparison:
    """Compare the loss, every parameter's gradient, their norm and every choice of experts. A measurement in which some
    gradient is 0 proves nothing."""
    loss_error = _relative(measured.loss, reference.loss, reference.magnitude)
    limit = tolerance.gradient
    base_error = None
    if measured.base is not None and reference.base is not None:
        base_error = _relative(measured.base, reference.base, reference.magnitude)
    worse = [k for k, v in reference.details.items() if not abs(measured.details[k] - v) <= limit * max(abs(v), 1.0)]
    norm_error = _relative(measured.grad_norm, reference.grad_norm, reference.grad_norm)
    errors = {
        name: math.sqrt(norms.difference / norms.reference) if norms.reference > 0 else math.inf
        for name, norms in measured.parameters.items()
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    reasons = routing_faults(measured.routing, reference.routing)
    missing = sorted(reference.parameters.keys() - measured.parameters.keys())
    vacuous = sorted(name for name, norms in reference.parameters.items() if norms.gradient == 0)
    if missing:
        reasons.append(f"no gradient for {missing[0]}")
    if vacuous:
        reasons.append(f"the reference gradient of {vacuous[0]} is zero: nothing is proved")
    if measured.canary:
        reasons.append(f"canary: {measured.canary}")
    if not loss_error <= tolerance.loss:
        reasons.append(f"loss off by {loss_error:.1e}")
    if base_error is not None and not base_error <= tolerance.loss:
        reasons.append(f"loss without the adapter off by {base_error:.1e}")
    if worse:
        reasons.append(f"{worse[0]} is {measured.details[worse[0]]!r}, not {reference.details[worse[0]]!r}")
    if not errors[worst] <= tolerance.gradient:
        reasons.append(f"gradient of {worst} off by {errors[worst]:.1e}")
    if not norm_error <= tolerance.gradient:
        reasons.append(f"gradient norm off by {norm_error:.1e}")
    routing = (measured.flips, measured.smallest_margin)
    passed, reason = not reasons, "; ".join(reasons)
    return Comparison(loss_error, norm_error, errors[worst], worst, *routing, passed, reason, base_error)


def _relative(measured: float, reference: float, size: float) -> float:
    return abs(measured - reference) / abs(size) if size else math.inf


def _set_budget(engine: Engine, case: Case, samples: Sequence[Sample]) -> None:
    budget = case.max_tokens or sum(len(sample) for sample in samples)
    batch = dataclasses.replace(engine.config.batch, max_tokens=budget)
    engine.config = dataclasses.replace(engine.config, batch=batch)


def _compare(gradients: Mapping[str, Tensor], reference: str) -> dict[str, Norms]:
    norms = {}
    with safe_open(reference, "pt") as file:
        for name, gradient in gradients.items():
            expected = file.get_tensor(name).to(gradient.device)
            squares = (gradient, expected, gradient - expected)
            norms[name] = Norms(*(float(t.square().sum()) for t in squares))
    return norms


def _recording(messages: list[str]) -> Callable[[Callable], Callable]:
    """Return a check of the canary that records a failure instead of ending the step: a proof needs the gradients as
    well."""

    def recording(check_canary: Callable) -> Callable:
        def check_and_record(*args) -> None:
            try:
                check_canary(*args)
            except CanaryError as error:
                messages.append(str(error))

        return check_and_record

    return recording


def reference_file(folder: str | Path, index: int | str) -> str:
    return str(Path(folder) / f"reference-{index}.safetensors")
