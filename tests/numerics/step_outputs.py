"""What a training pass returns at every target, and the same asked otherwise; runs on every rank."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.models.transformers_parity import gradients_by_hf_name, make_engine
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import LossConfig
from isoloss.engine.step.losses import cross_entropy, target_logprobs

PLAIN = cross_entropy(LossConfig())
ASKED = dataclasses.replace(PLAIN, outputs={"logprobs": target_logprobs, "twice": lambda i: 2 * i.logprobs_N})


@dataclass(frozen=True)
class Outputs:
    """losses: of the pass with outputs, of one without, and of an evaluation. gradients: by Hugging Face name, of the
    first two passes. outputs: of the training pass and of the evaluation. logprobs: of `Engine.logprobs`."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    outputs: list[dict[str, list[Tensor]]]
    logprobs: list[Tensor]


def outputs(folder: Path, samples: Sequence[Sample], parallel: dict, share_prefixes: bool = False) -> Outputs:
    engine = make_engine(folder, "fp64", max_tokens=64, **parallel)
    batch = dataclasses.replace(engine.config.batch, share_prefixes=share_prefixes)
    engine.config = dataclasses.replace(engine.config, batch=batch)
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
