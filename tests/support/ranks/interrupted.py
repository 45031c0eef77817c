"""Optimizer steps with a checkpoint before or after them, and exports; runs on every rank."""

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.tools.prove.parity import thaw
from support.runs.training import Arrays, weights


def steps(
    config: Config, frozen: bytes, count: int, load: str | None = None, save: str | None = None
) -> tuple[list[float], Arrays]:
    """Losses of `count` steps on the same samples, and the weights of this rank's stages after them."""
    engine, samples = Engine(config), thaw(frozen)
    if load:
        engine.load(load)
    losses = [engine.train_step(samples, cross_entropy(LossConfig()))[0].loss for _ in range(count)]
    if save:
        engine.save(save)
    return losses, weights(engine)


def export(config: Config, folder: str) -> None:
    Engine(config).export_hf(folder)
