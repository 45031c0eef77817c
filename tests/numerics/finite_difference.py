"""The slope of the loss along its own gradient, claimed and measured."""

from pathlib import Path

import torch

from isoloss.engine.config.schema import BatchConfig, Config, DataConfig, LossConfig, ModelConfig, TrainConfig
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.recipes.launch import ASSETS

STEP = 1e-5


def slope(cache_dir: str) -> tuple[float, float]:
    """(squared gradient norm, central difference of the loss along the gradient), in fp64."""
    tiny = str(ASSETS / "tiny")
    config = Config(
        ModelConfig(path=tiny, from_scratch=True),
        batch=BatchConfig(max_tokens=1024),
        train=TrainConfig(precision="fp64"),
    )
    engine = Engine(config)
    data = DataConfig(eval=(f"{tiny}/eval.jsonl",), max_length=512)
    rows = load_dataset(data, "eval", tiny, vocab_size=2048, cache_dir=Path(cache_dir))
    samples, loss = [rows[index] for index in range(4)], cross_entropy(LossConfig("seq-mean-token-mean"))
    engine.forward_backward(samples, loss)
    engine.reduce_gradients()
    parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
    gradients = [p.main_grad.clone() for p in parameters]
    claimed = float(sum(g.square().sum() for g in gradients))
    values = []
    for sign in (1, -2):  # theta + h g, then theta - h g
        with torch.no_grad():
            for p, g in zip(parameters, gradients):
                p.add_(g, alpha=sign * STEP)
        values.append(engine.evaluate(samples, loss).loss)
    return claimed, (values[0] - values[1]) / (2 * STEP)
