"""A run that was interrupted and goes on is the run that was not."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from worlds import training as world
from worlds.thinned import thinned

from isoloss.engine import checkpoint
from isoloss.engine.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.parallel import Layout, UserError
from isoloss.recipes import launch, sft
from isoloss.tools.prove import on_layout

STEPS, SAVED = 8, 4


def config_of(inputs, out: Path, layout: str, precision: str, distributed_optimizer: bool | None) -> Config:
    config = Config(
        ModelConfig(path=f"{inputs}/model", from_scratch=True),
        data=DataConfig((f"{inputs}/rows.jsonl",), max_length=128),
        batch=BatchConfig(5, 128),  # 12 rows: the second epoch begins within a step, and is shuffled anew
        optim=OptimConfig(lr=1e-3, warmup_steps=2),
        train=TrainConfig(STEPS),
        checkpoint=CheckpointConfig(every=SAVED),
        output_dir=str(out),
    )
    config = on_layout(config, Layout.parse(layout), precision)
    parallel = dataclasses.replace(config.parallel, distributed_optimizer=distributed_optimizer)
    return dataclasses.replace(config, parallel=parallel)


def resumed(config: Config) -> Config:
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=True))


def rows_of(config: Config) -> list[dict]:
    return [json.loads(line) for line in Path(config.output_dir, "metrics.jsonl").read_text().splitlines()]


def numbers(config: Config) -> list[tuple]:
    """Everything of metrics.jsonl that is not about time."""
    return [
        tuple(v for k, v in row.items() if k not in ("seconds", "tokens_per_second", "mfu")) for row in rows_of(config)
    ]


@pytest.fixture
def train(pool):
    def run(config: Config, layout: str, killed_after: int | None = None, killed_in_save: int | None = None):
        size = Layout.parse(layout).world_size
        return world.merged(pool.run(size, world.train, config, killed_after, killed_in_save))

    return run


STATES = (("fp32", True), ("fp32", False), ("bf16", True), ("bf16", False), ("fp64", False))
RESUMED = [(layout, *state) for layout in ("1", "dp2", "tp2+pp2") for state in STATES]


@pytest.mark.parametrize(
    ("layout", "precision", "distributed_optimizer"),
    thinned(RESUMED, lambda row: row[0] == "tp2+pp2" or row[1:] == ("fp32", True) or row == ("dp2", "bf16", True)),
)
def test_resume_is_exact(train, inputs, tmp_path, layout, precision, distributed_optimizer):
    """Losses, gradient norms, learning rates and weights, bit for bit, whatever was logged after the checkpoint."""
    whole, parts = (
        config_of(inputs, tmp_path / name, layout, precision, distributed_optimizer) for name in ("whole", "parts")
    )
    expected = train(whole, layout)
    train(parts, layout, killed_after=6)
    assert [row["step"] for row in rows_of(parts)] == [1, 2, 3, 4, 5, 6]
    found = train(resumed(parts), layout)
    assert numbers(parts) == numbers(whole)
    assert [row["step"] for row in rows_of(parts)] == list(range(1, STEPS + 1))
    assert world.same(found, expected)


@pytest.fixture(scope="module")
def saved_at_tp2(pool, inputs, tmp_path_factory):
    """(folder of a run of tp2 killed after step 6, rows of the run without an accident, and the weights at its end)."""
    folder = tmp_path_factory.mktemp("tp2")
    whole, parts = (config_of(inputs, folder / name, "tp2", "fp32", True) for name in ("whole", "parts"))
    weights = world.merged(pool.run(2, world.train, whole))
    pool.run(2, world.train, parts, 6)
    return folder / "parts", rows_of(whole), weights


@pytest.mark.parametrize("layout", ("1", "pp2", "dp2", "ulysses2", "ring2", "pp2+vpp2", "tp2+pp2+ulysses2"))
def test_resume_on_another_layout(train, inputs, tmp_path, saved_at_tp2, layout):
    folder, expected, _ = saved_at_tp2
    shutil.copytree(folder, tmp_path / "run")
    config = config_of(inputs, tmp_path / "run", layout, "fp32", True)
    train(resumed(config), layout)
    rows = rows_of(config)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-6)
    assert rows[SAVED - 1] == json.loads((folder / "metrics.jsonl").read_text().splitlines()[SAVED - 1])
    assert rows[-1]["loss"] < 0.999 * rows[SAVED]["loss"]  # the weights did move after the resume


@pytest.mark.parametrize("distributed_optimizer", (True, False), ids=("to plainopt", "to distopt"))
def test_the_optimizer_cannot_be_switched(train, inputs, tmp_path, distributed_optimizer):
    """Their states have different forms in the checkpoint."""
    config = config_of(inputs, tmp_path / "run", "1", "fp32", distributed_optimizer)
    train(config, "1", killed_after=6)
    switched = config_of(inputs, tmp_path / "run", "1", "fp32", not distributed_optimizer)
    before = Path(config.output_dir, "config.yaml").read_text()
    said = f"parallel.distributed_optimizer={not distributed_optimizer} differs from the {distributed_optimizer}"
    with pytest.raises(UserError, match=said):
        train(resumed(switched), "1")
    assert Path(config.output_dir, "config.yaml").read_text() == before


# ---- folders --------------------------------------------------------------------------------------------------------


def test_a_kill_while_saving(train, inputs, tmp_path):
    """The half-written checkpoint is never chosen, the run goes on from the one before it, and no trace remains."""
    whole, parts = (config_of(inputs, tmp_path / name, "dp2", "fp32", True) for name in ("whole", "parts"))
    expected = train(whole, "dp2")
    train(parts, "dp2", killed_in_save=STEPS)
    folder = Path(parts.output_dir, "checkpoints")
    assert len(list(folder.iterdir())) == 2  # step 4, and what the kill left
    assert checkpoint.latest(folder) == folder / "step_00000004"
    assert world.same(train(resumed(parts), "dp2"), expected)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000004", "step_00000008"]
    assert numbers(parts) == numbers(whole)


def test_only_the_newest_checkpoints_stay(arguments):
    argv = [*arguments, "train.steps=5", "checkpoint.every=1", "checkpoint.keep=2"]
    assert launch.main("sft", Config, sft.run, argv) == 0
    folder = Path("out/checkpoints")
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000004", "step_00000005"]


def test_prune_after_a_kill(tmp_path):
    """What a kill in the middle of a prune or of a save leaves behind goes with the next prune."""
    for name in ("step_00000001", "step_00000002", "step_00000003", ".step_00000001.old", ".step_00000004.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "isoloss.json").touch()
    checkpoint.prune(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000003"]


def test_a_finished_run_can_be_made_longer(arguments, capsys):
    """The exported model is that of the new end; nothing is told twice."""
    argv = [*arguments, "optim.schedule=constant"]
    assert launch.main("sft", Config, sft.run, argv) == 0
    before = Path("out/hf/model.safetensors").read_bytes()
    assert launch.main("sft", Config, sft.run, [*argv, "checkpoint.resume=true"]) == 0  # nothing left to do
    assert Path("out/hf/model.safetensors").read_bytes() == before
    assert launch.main("sft", Config, sft.run, [*argv, "checkpoint.resume=true", "train.steps=3"]) == 0
    assert Path("out/hf/model.safetensors").read_bytes() != before
    steps = [json.loads(line)["step"] for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("distributed_optimizer", (True, False), ids=("distopt", "plainopt"))
def test_a_checkpoint_before_the_first_step(pool, inputs, tmp_path, distributed_optimizer):
    config = config_of(inputs, tmp_path / "unused", "dp2", "fp32", distributed_optimizer)
    straight, loaded = (
        pool.run(2, world.first_step, config, folder) for folder in (None, str(tmp_path / "step_00000000"))
    )
    assert straight == loaded


def test_resume_without_a_run_starts_one(arguments):
    assert launch.main("sft", Config, sft.run, [*arguments, "checkpoint.resume=true"]) == 0
    assert Path("out/hf").is_dir()
