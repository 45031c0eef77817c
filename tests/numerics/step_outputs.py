"""What a training pass returns at every target, and the same asked otherwise; runs on every rank."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.models.transformers_parity import gradients_by_hf_name, make_engine
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, TokenInputs, cross_entropy, target_logprobs

PLAIN = cross_entropy(LossConfig())
ASKED = dataclasses.replace(PLAIN, outputs={"logprobs": target_logprobs, "twice": lambda i: 2 * i.logprobs_N})


def weighted(inputs: TokenInputs) -> Tensor:
    """Cross-entropy of K weighted targets of each position."""
    return -(inputs.fields["weights"] * inputs.logprobs_N).sum(1)


WEIGHTED = dataclasses.replace(
    Loss.of(weighted, "sum"),
    outputs={"logprobs": target_logprobs, "loss": weighted, "twice": lambda i: 2 * i.logprobs_N},
)


@dataclass(frozen=True)
class Outputs:
    """losses: of the pass with outputs, of one without, and of an evaluation. gradients: by Hugging Face name, of the
    first two passes. outputs: of the training pass and of the evaluation. logprobs: of `Engine.logprobs`."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    outputs: list[dict[str, list[Tensor]]]
    logprobs: list[Tensor]


def of_several_targets(folder: Path, samples: Sequence[Sample], parallel: dict, share_prefixes: bool) -> Outputs:
    """Of one pass with outputs, and of an evaluation."""
    engine = _engine(folder, parallel, share_prefixes)
    metrics = engine.forward_backward(samples, WEIGHTED)
    gradients = gradients_by_hf_name(engine)
    engine.zero_grad()
    evaluated = engine.evaluate(samples, WEIGHTED)
    returned = [{name: list(values) for name, values in each.outputs.items()} for each in (metrics, evaluated)]
    return Outputs([metrics.loss, evaluated.loss], [gradients], returned, engine.logprobs(samples))


def _engine(folder: Path, parallel: dict, share_prefixes: bool) -> Engine:
    engine = make_engine(folder, "fp64", max_tokens=64, **parallel)
    batch = dataclasses.replace(engine.config.batch, share_prefixes=share_prefixes)
    engine.config = dataclasses.replace(engine.config, batch=batch)
    return engine


def outputs(folder: Path, samples: Sequence[Sample], parallel: dict, share_prefixes: bool = False) -> Outputs:
    engine = _engine(folder, parallel, share_prefixes)
    losses, gradients, returned = [], [], []
    for loss in (ASKED, PLAIN):
        metrics = engine.forward_backward(samples, loss)
        losses.append(metrics.loss)
        gradients.append(gradients_by_hf_name(engine))
        returned.append({name: list(values) for name, values in metrics.outputs.items()})
        engine.zero_grad()
    assert returned.pop() == {} and metrics.micro_batches > 1
    evaluated = engine.evaluate(samples, ASKED)
    losses.append(evaluated.loss)
    returned.append({name: list(values) for name, values in evaluated.outputs.items()})
    return Outputs(losses, gradients, returned, engine.logprobs(samples))
