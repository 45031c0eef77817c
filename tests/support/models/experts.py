"""Tiny models with experts, and what their ranks run."""

from collections.abc import Sequence

import torch

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.engine.step.optimizer import global_grad_norm
from isoloss.tools.prove.bugs import NO_BUG, PlantedBug
from isoloss.tools.prove.parity import thaw
from support.ranks.invariance import FOUR_LAYERS

STEP = 1e-8  # of a finite difference
# Changes of families' models of these names.
MODELS = {
    "qwen3-moe": FOUR_LAYERS | {"num_experts": 8},
    "mixtral": FOUR_LAYERS | {"hidden_size": 48, "intermediate_size": 28, "sliding_window": None},
    # A selection bias, groups of which some are kept, a shared expert and a dense first layer.
    "glm-4.5": FOUR_LAYERS | {"head_dim": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    # The same with latent attention.
    "glm-4.7-flash": FOUR_LAYERS | {"num_key_value_heads": 8},
    # Queries that grow with their position, past many of the original length; a softmax over groups of experts.
    "mistral-4": FOUR_LAYERS | {"num_key_value_heads": 8},
    # A shared expert with a gate, and every other layer Gated DeltaNet.
    "qwen3.5-moe": FOUR_LAYERS | {"num_experts": 8, "head_dim": 20},
    # A norm over all heads together, of which TP ranks have a share each.
    "minimax-m2": FOUR_LAYERS | {"intermediate_size": 28, "head_dim": 8, "rotary_dim": 4},
    # Layers of two kinds, with 4 and 8 key/value heads; a dense first layer.
    "mimo-v2-flash": FOUR_LAYERS | {"head_dim": 20},
}


def selection_biases(config: Config, frozen: bytes, steps: int, bug: PlantedBug = NO_BUG) -> dict[str, list[float]]:
    """This rank's selection biases after some steps on the same samples, by weight name.

    Between the steps the samples are evaluated and asked for log-probabilities, which must not count.
    """
    engine = Engine(config)
    samples, loss = thaw(frozen), cross_entropy(config.loss)
    with bug.planted():
        for _ in range(steps):
            engine.forward_backward(samples, loss)
            engine.evaluate(samples, loss)
            engine.logprobs(samples)
            assert engine.optim_step().applied
    return biases_of(engine)


def biases_of(engine: Engine) -> dict[str, list[float]]:
    return {name: weight.tolist() for name, weight in engine.weights() if name.endswith("expert_bias")}


def biases_by_calls(config: Config, frozen: bytes, parts: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """After a step whose samples came in several calls."""
    engine = Engine(config)
    samples = thaw(frozen)
    for part in parts:
        engine.forward_backward([samples[index] for index in part], cross_entropy(LossConfig("sum")))
    assert engine.optim_step().applied
    return biases_of(engine)


def biases_of_steps_not_taken(config: Config, frozen: bytes) -> dict[str, list[float]]:
    """After a step that was thrown away and one whose loss was not finite, which is not applied."""
    engine = Engine(config)
    samples, loss = thaw(frozen), cross_entropy(LossConfig())
    engine.forward_backward(samples, loss)
    engine.zero_grad()
    engine.forward_backward(samples, loss)
    engine.trained.finite = False
    assert not engine.optim_step().applied
    return biases_of(engine)


def biases_resumed(config: Config, frozen: bytes, folder: str, steps: int) -> tuple[dict, dict]:
    """After `steps`, a checkpoint, and as many more steps of the engine that wrote it and of one that read it."""
    loss, samples = cross_entropy(LossConfig()), thaw(frozen)
    engine = Engine(config)
    for _ in range(steps):
        engine.train_step(samples, loss)
    engine.save(folder)
    for _ in range(steps):
        engine.train_step(samples, loss)
    resumed = Engine(config)
    resumed.load(folder)
    for _ in range(steps):
        resumed.train_step(samples, loss)
    return biases_of(engine), biases_of(resumed)


def loss_without_gradients(config: Config, frozen: bytes) -> tuple[float, float, float]:
    """The loss that training differentiates, its terms without those of the routers, and what evaluation reports."""
    engine = Engine(config)
    samples, loss = thaw(frozen), cross_entropy(LossConfig())
    with torch.no_grad():
        evaluated = engine.evaluate(samples, loss)
    trained = engine.forward_backward(samples, loss)
    assert set(evaluated.terms) == {"loss"}
    return trained.loss, trained.terms["loss"], evaluated.loss


def slope(config: Config, frozen: bytes) -> tuple[float, float]:
    """(squared gradient norm, central difference of the training loss along the gradient).

    The step is so small that no token chooses other experts.
    """
    engine = Engine(config)
    samples, loss = thaw(frozen), cross_entropy(LossConfig("seq-mean-token-mean"))
    engine.forward_backward(samples, loss)
    engine.reduce_gradients()
    engine.optimizer.prepare_grads()
    claimed = global_grad_norm(engine.optimizer) ** 2
    parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
    gradients = [p.main_grad.clone() for p in parameters]
    values = []
    for sign in (1, -2):  # theta + h g, then theta - h g
        with torch.no_grad():
            for p, g in zip(parameters, gradients):
                p.add_(g, alpha=sign * STEP)
        engine.zero_grad()
        values.append(engine.forward_backward(samples, loss).loss)
    return claimed, (values[0] - values[1]) / (2 * STEP)
