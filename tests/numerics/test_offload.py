"""An optimizer whose state lives in CPU memory, whole or in part, is the same optimizer."""

from pathlib import Path

import pytest
import torch
from support.models.families import VOCAB, write_folder
from support.ranks import interrupted
from support.runs.training import same

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.tools.prove.parity import freeze


@pytest.fixture(scope="module", params=("qwen3", "deepseek-v3"))
def folder(request, tmp_path_factory) -> Path:
    """A dense model, and one whose first layer has no experts: alone on a stage it has none to optimize."""
    return write_folder(request.param, tmp_path_factory.mktemp(request.param))


def samples() -> bytes:
    tokens = torch.arange(1, 60) % VOCAB
    return freeze([Sample(tokens[:n], tokens[:n] > 3) for n in (9, 39, 20, 59)])


def config(folder: Path, share: float, **parallel) -> Config:
    return Config(
        ModelConfig(str(folder)),
        batch=BatchConfig(max_tokens=64),
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(offload_optimizer=share),
        optim=OptimConfig(lr=1e-2, weight_decay=0.1, clip=0.1),
        train=TrainConfig(precision="bf16"),
    )


LAYOUTS = {"dp2": {}, "pp2": {"pp": 2}}


@pytest.mark.parametrize("share", (0.3, 1.0))
@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
def test_it_takes_the_same_steps(pool, folder, share, parallel):
    plain = pool.run(2, interrupted.steps, config(folder, 0.0, **parallel), samples(), 3)
    found = pool.run(2, interrupted.steps, config(folder, share, **parallel), samples(), 3)
    for (losses, weights), (wanted_losses, wanted) in zip(found, plain, strict=True):
        assert losses == wanted_losses and same(weights, wanted)
    assert plain[0][0][-1] != plain[0][0][0]


@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("saved", "loaded"), ((0.0, 1.0), (1.0, 0.0), (1.0, 0.3)))
def test_a_checkpoint_goes_on_with_another_share(pool, folder, parallel, saved, loaded, tmp_path):
    """Bit-equal to a run that was not interrupted: moments, fp32 weights and step count survive."""
    kept = tmp_path / "checkpoint"
    pool.run(2, interrupted.steps, config(folder, saved, **parallel), samples(), 2, None, str(kept))
    wanted = pool.run(2, interrupted.steps, config(folder, saved, **parallel), samples(), 4)
    found = pool.run(2, interrupted.steps, config(folder, loaded, **parallel), samples(), 2, str(kept))
    for (losses, weights), (wanted_losses, wanted_weights) in zip(found, wanted, strict=True):
        assert losses == wanted_losses[2:] and same(weights, wanted_weights)
    assert b"AdamW" not in (kept / "common.pt").read_bytes()  # a class would tie it to machines that have it


def test_a_checkpoint_before_the_first_step_goes_on(pool, folder, tmp_path):
    kept = str(tmp_path / "checkpoint")
    pool.run(2, interrupted.steps, config(folder, 0.5), samples(), 0, None, kept)
    wanted = pool.run(2, interrupted.steps, config(folder, 0.5), samples(), 2)
    found = pool.run(2, interrupted.steps, config(folder, 0.5), samples(), 2, kept)
    assert [losses for losses, _ in found] == [losses for losses, _ in wanted]
