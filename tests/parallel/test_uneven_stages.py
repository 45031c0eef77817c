"""Stages of any number of layers: checkpoints, streams and exports know which layer is which."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.faults import impossible
from support.models.families import published, tensors_of, write_config
from support.models.transformers_parity import make_samples
from support.ranks import interrupted
from support.ranks.invariance import QWEN3
from support.runs import rollouts
from support.runs.training import merged

from isoloss.engine.config.schema import BatchConfig, Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from isoloss.tools.prove.parity import freeze

DENSE, LATENT = "dense of 8 layers", "latent of 4, the first without experts"
MODELS = {DENSE: published("qwen3", **QWEN3), LATENT: impossible.MODELS["latent"]}
SAMPLES = freeze(make_samples((40, 17, 29, 33, 60, 9), 307))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def of(model: str) -> Path:
        return write_config(tmp_path_factory.mktemp("model") / "hf", MODELS[model])

    return of


def config(folder: Path, precision: str, **parallel) -> Config:
    return Config(
        ModelConfig(str(folder), from_scratch=True),
        batch=BatchConfig(max_tokens=96),
        parallel=ParallelConfig(**parallel),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(precision=precision),
    )


@pytest.mark.parametrize("distributed_optimizer", (True, False), ids=("distopt", "plainopt"))
@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    (
        (DENSE, {"pp": 2, "stage_layers": (3, 5)}, {"pp": 4, "vpp": 2}),
        (DENSE, {"pp": 4, "stage_layers": (1, 2, 2, 3)}, {"pp": 2, "vpp": 2, "stage_layers": (1, 3, 2, 2)}),
        (DENSE, {"pp": 2, "vpp": 2, "stage_layers": (1, 3, 2, 2)}, {"tp": 2}),
        (LATENT, {"pp": 2, "ep": 2, "stage_layers": (1, 3)}, {"pp": 4}),
        (LATENT, {"pp": 4}, {"pp": 2, "stage_layers": (3, 1)}),
    ),
    ids=str,
)
def test_a_checkpoint_goes_on_in_other_stages(pool, folder, model, saved, loaded, distributed_optimizer, tmp_path):
    def run(parallel, *arguments):
        world = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("ep", 1)
        values = config(path, "fp32", distributed_optimizer=distributed_optimizer, **parallel)
        of_ranks = pool.run(world, interrupted.steps, values, SAMPLES, *arguments)
        return of_ranks[0][0], merged([weights for _, weights in of_ranks])

    path, kept = folder(model), str(tmp_path / "checkpoint")
    run(saved, 2, None, kept)
    wanted_losses, wanted = run(saved, 3)
    losses, found = run(loaded, 1, kept)
    assert losses == pytest.approx(wanted_losses[2:], rel=1e-6)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "parallel", ({"pp": 2, "stage_layers": (5, 3)}, {"pp": 2, "vpp": 2, "stage_layers": (1, 3, 3, 1)}), ids=str
)
def test_the_export_and_the_stream_name_every_layer(pool, folder, parallel, tmp_path):
    path, whole, spread = folder(DENSE), tmp_path / "whole", tmp_path / "spread"
    pool.run(1, interrupted.export, config(path, "fp32"), str(whole))
    pool.run(2, interrupted.export, config(path, "fp32", **parallel), str(spread))
    wanted, exported = tensors_of(whole), tensors_of(spread)
    rank_0, rank_1 = pool.run(2, rollouts.buckets, whole, 30_000, parallel)
    for found in (exported, *(dict(itertools.chain.from_iterable(rank["every rank"])) for rank in (rank_0, rank_1))):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
