"""A run that was interrupted and goes on is the run that was not."""

import dataclasses
import json
import multiprocessing
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from oracles import mixture
from support.runs import training as world
from support.runs.runs import metrics_of, numbers, resumed, write_rows

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.config.data_config import WeightedFile
from isoloss.engine.config.schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from isoloss.engine.run import folder as run_folder
from isoloss.engine.run import run
from isoloss.engine.sft import loop
from isoloss.models.weights import manifest
from isoloss.parallel import Layout, UserError
from isoloss.recipes import launch
from isoloss.tools.prove.proof import on_layout

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


@pytest.fixture
def train(pool):
    def run(config: Config, layout: str, **accident: int):
        size = Layout.parse(layout).world_size
        return world.merged(pool.run(size, partial(world.train, **accident), config))

    return run


STATES = (("fp32", True), ("fp32", False), ("bf16", True), ("bf16", False), ("fp64", False))
RESUMED = [(layout, *state) for layout in ("1", "dp2", "tp2+pp2") for state in STATES]


@pytest.mark.parametrize(("layout", "precision", "distributed_optimizer"), RESUMED)
def test_resume_is_exact(train, inputs, tmp_path, layout, precision, distributed_optimizer):
    """Losses, gradient norms, learning rates and weights, bit for bit, whatever was logged after the checkpoint."""
    whole, parts = (
        config_of(inputs, tmp_path / name, layout, precision, distributed_optimizer) for name in ("whole", "parts")
    )
    expected = train(whole, layout)
    train(parts, layout, killed_after=6)
    assert [row["step"] for row in metrics_of(parts)] == [1, 2, 3, 4, 5, 6]
    found = train(resumed(parts), layout)
    assert numbers(parts.output_dir) == numbers(whole.output_dir)
    assert [row["step"] for row in metrics_of(parts)] == list(range(1, STEPS + 1))
    assert world.same(found, expected)


def test_weighted_files_on_another_layout_and_after_a_kill(pool, inputs, tmp_path):
    """Killed on one layout and resumed on another: every step has the rows that the shares say, for 24 draws 18 and 6
    exactly."""
    files = {"many.jsonl": (7, 3), "few.jsonl": (2, 1)}
    for name, (count, _) in files.items():
        write_rows(tmp_path / name, [{"text": f"one two {name} {number}"} for number in range(count)])
    weighted = tuple(WeightedFile(f"{tmp_path}/{name}", weight) for name, (_, weight) in files.items())
    first, second = (
        dataclasses.replace(
            config_of(inputs, tmp_path / "run", layout, "fp32", None),
            data=DataConfig(weighted, max_length=128),
            batch=BatchConfig(3, 128),
        )
        for layout in ("tp2", "dp2")
    )
    before, *_ = pool.run(2, partial(world.train_and_list, killed_after=6), first)
    after, *others = pool.run(2, world.train_and_list, resumed(second))
    assert (len(before), len(after)) == (6, STEPS - SAVED) and others == [after]
    rows = [Path(row).name for step in before[:SAVED] + after for row in step]
    assert rows == mixture.draws(files, STEPS * 3, second.train.seed) and before[SAVED:] == after[:2]
    assert [sum(row.startswith(name) for row in rows) for name in files] == [18, 6]


@pytest.mark.parametrize("layout", ("1", "dp2", "tp2+pp2"))
def test_a_run_that_is_told_to_end_saves_first(train, inputs, tmp_path, layout):
    """One rank is told, all end after the step under way, which no checkpoint was due after; none is done twice."""
    whole, parts = (config_of(inputs, tmp_path / name, layout, "fp32", None) for name in ("whole", "parts"))
    expected = train(whole, layout)
    train(parts, layout, told_after=6)
    assert [row["step"] for row in metrics_of(parts)] == [1, 2, 3, 4, 5, 6]
    folders = sorted(path.name for path in Path(parts.output_dir, "checkpoints").iterdir())
    assert folders == ["step_00000004", "step_00000006"]
    assert world.same(train(resumed(parts), layout), expected)
    assert numbers(parts.output_dir) == numbers(whole.output_dir)


TOLD = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}


@pytest.mark.parametrize("told", TOLD, ids=lambda told: told.name)
def test_the_status_of_a_run_that_was_told_to_end(told, arguments, capsys, monkeypatch, request):
    """It says what it saved, and the signals then do what they did before."""
    check = run.BadStepGuard.check
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell may have had these tests ignore it
        request.addfinalizer(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def tell(self, step, *rest):
        if step == 1:
            signal.raise_signal(told)
            if told != signal.SIGINT:  # whose second one ends at once: tests/cli/test_interrupts.py
                signal.raise_signal(told)  # a cluster may send it to torchrun as well, which passes it on
        check(self, step, *rest)

    before = [signal.getsignal(each) for each in TOLD]
    with monkeypatch.context() as patch:
        patch.setattr(run.BadStepGuard, "check", tell)
        assert launch.main("sft", arguments) == TOLD[told]
    assert [signal.getsignal(each) for each in TOLD] == before
    said, errors = (text.splitlines() for text in capsys.readouterr())
    told_at_once = [line for line in errors if line.startswith("isoloss: ")]
    assert len(told_at_once) == (told == signal.SIGINT) and not any("Traceback" in line for line in errors)
    assert said[-1] == (
        f"told to end by {told.name}: saved out/checkpoints/step_00000001; go on with checkpoint.resume=true"
    )
    assert Path("out/checkpoints/step_00000001").is_dir() and not Path("out/hf").exists()
    changed = ["optim.betas=[0.8,0.9]"] if told == signal.SIGTERM else []
    assert launch.main("sft", [*arguments, "checkpoint.resume=true", *changed]) == 0
    assert [row["step"] for row in numbers("out")] == [1, 2]
    differs = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since that checkpoint")
    ]
    line = "changed since that checkpoint: optim.betas is [0.8, 0.9], was [0.9, 0.95]"
    assert differs == ([line] if changed else [])


def test_a_run_that_is_told_to_end_in_its_last_step_is_done(arguments, monkeypatch):
    check = run.BadStepGuard.check

    def tell(self, step, *rest):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        check(self, step, *rest)

    monkeypatch.setattr(run.BadStepGuard, "check", tell)
    assert launch.main("sft", arguments) == 0
    assert Path("out/hf").exists()


@pytest.fixture(scope="module")
def saved_at_tp2(pool, inputs, tmp_path_factory):
    """(folder of a run of tp2 killed after step 6, rows of the run without an accident, its first and last weights)."""
    folder = tmp_path_factory.mktemp("tp2")
    whole, parts = (config_of(inputs, folder / name, "tp2", "fp32", True) for name in ("whole", "parts"))
    weights = world.merged(pool.run(2, world.train, whole))
    pool.run(2, world.train, parts, 6)
    start = world.merged(pool.run(2, world.untrained, whole))
    return folder / "parts", metrics_of(whole), start, weights


@pytest.mark.parametrize("layout", ("1", "pp2", "dp2", "ulysses2", "ring2", "pp2+vpp2", "tp2+pp2+ulysses2"))
def test_resume_on_another_layout(train, inputs, tmp_path, saved_at_tp2, layout):
    folder, expected, start, weights = saved_at_tp2
    shutil.copytree(folder, tmp_path / "run")
    config = config_of(inputs, tmp_path / "run", layout, "fp32", True)
    found = train(resumed(config), layout)
    assert found.keys() == weights.keys() and len(found) > 30
    for name, wanted in weights.items():
        moved = np.linalg.norm(wanted - start[name])
        assert moved > 0 and np.linalg.norm(found[name] - wanted) <= 1e-5 * moved, name
    rows = metrics_of(config)
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


# ---- what the configuration only names -----------------------------------------------------------------------------


@pytest.fixture
def own(inputs, arguments) -> tuple[Path, list[str]]:
    """A folder `mine` with model and rows that a test may change, and the overrides of a run with them."""
    shutil.copytree(inputs, "mine")
    return Path("mine").absolute(), [argument.replace(str(inputs), "mine") for argument in arguments]


def other_answer(folder: Path) -> None:
    rows = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text(rows.replace("7 plus 7 is 14", "7 plus 7 is 15"))


def other_order(folder: Path) -> None:
    first, *rest = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join([*rest, first]))


def other_template(folder: Path) -> None:
    template = folder / "model" / "chat_template.jinja"
    template.write_text("Talk:\n" + template.read_text())


def other_tokenizer(folder: Path) -> None:
    """Two words have changed places."""
    path = folder / "model" / "tokenizer.json"
    spec = json.loads(path.read_text())
    words = spec["model"]["vocab"]
    words["\u0120the"], words["\u0120is"] = words["\u0120is"], words["\u0120the"]
    path.write_text(json.dumps(spec))


@pytest.mark.parametrize(
    ("change", "overrides"),
    (
        (other_answer, ()),
        (other_order, ()),
        (other_template, ()),
        (other_tokenizer, ()),
        (None, ("data.max_length=34", "data.overlong=drop")),
        (None, ("data.max_length=34", "data.overlong=truncate")),
    ),
    ids=("answer", "order", "template", "tokenizer", "drop", "truncate"),
)
def test_other_rows_are_another_run(change, overrides, own, capsys):
    folder, argv = own
    assert launch.main("sft", argv) == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    if change:
        change(folder)
    capsys.readouterr()
    argv = [*argv, "checkpoint.resume=true", "train.steps=3", *overrides]
    assert launch.main("sft", argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert all(part in err for part in ("the content of data.train", "step_00000002", "another run", "set it back"))
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("name", "value"), (("rms_norm_eps", 1e-5), ("rope_theta", 5e3)))
def test_another_architecture_is_another_run(name, value, own, capsys):
    """Also where no shape of a weight tells."""
    folder, argv = own
    assert launch.main("sft", argv) == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    described = folder / "model" / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {name: value}))
    capsys.readouterr()
    assert launch.main("sft", [*argv, "checkpoint.resume=true", "train.steps=3"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert all(part in err for part in ("architecture of model.path", "step_00000002", "another run")), err
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


DAMAGED = ("__0_0.distcp", "common.pt", ".metadata", "isoloss.json", "huggingface/config.json")


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x80  # in a text no longer UTF-8
    file.write_bytes(content)


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_newest_checkpoint_is_passed_over(name, arguments, capsys):
    """The run goes on from the one before it, names the file and keeps what it passed over."""
    argv = [*arguments, "checkpoint.every=1", "checkpoint.keep=3"]
    assert launch.main("sft", argv) == 0
    whole, checkpoints = Path("out/checkpoints/step_00000002"), Path("out/checkpoints")
    sound, expected = files_below(whole), numbers("out")
    damage(whole / name)
    damaged = files_below(whole)
    capsys.readouterr()
    assert launch.main("sft", [*argv, "checkpoint.resume=true"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "passed over" in line]
    assert len(told) == 1 and f"{whole / name}" in told[0] and "going on from out/checkpoints/step_00000001" in told[0]
    assert files_below(checkpoints / "damaged_step_00000002") == damaged
    tensors = {file for file in sound if file.endswith(".distcp")}
    again = files_below(whole)
    assert again.keys() == sound.keys() and all(again[file] == sound[file] for file in tensors)
    assert numbers("out") == expected


def test_a_part_of_one_rank_is_missed_by_all(train, inputs, tmp_path):
    """Several damaged checkpoints, each for another rank; and one that is not complete."""
    whole, parts = (config_of(inputs, tmp_path / name, "dp2", "fp32", True) for name in ("whole", "parts"))
    parts = dataclasses.replace(parts, checkpoint=CheckpointConfig(every=2, keep=4))
    expected = train(whole, "dp2")
    train(parts, "dp2")
    folder = Path(parts.output_dir, "checkpoints")
    damage(next((folder / "step_00000008").glob("__0_*.distcp")))
    next((folder / "step_00000006").glob("__1_*.distcp")).unlink()
    (folder / "step_00000004" / "isoloss.json").unlink()
    assert world.same(train(resumed(parts), "dp2"), expected)
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{kept}step_{step:08d}" for step in (4, 6, 8) for kept in ("", "damaged_")} | {"step_00000002"}
    assert numbers(parts.output_dir) == numbers(whole.output_dir)


@pytest.mark.parametrize("name", DAMAGED[:2])
def test_a_run_of_which_all_checkpoints_are_damaged_ends(name, arguments, capsys):
    """In one line that names the newest's file; the run does not start anew, and nothing is renamed."""
    argv = [*arguments, "checkpoint.every=1"]
    assert launch.main("sft", argv) == 0
    for step in (1, 2):
        damage(Path(f"out/checkpoints/step_{step:08d}") / name)
    before = files_below(Path("out/checkpoints"))
    capsys.readouterr()
    assert launch.main("sft", [*argv, "checkpoint.resume=true", "train.steps=3"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "Warning" not in line]
    assert len(told) == 1 and told[0].startswith("isoloss: error: none of the 2 checkpoint(s)"), told
    assert f"step_00000002/{name} is damaged" in told[0] and "delete all to start anew" in told[0]
    assert files_below(Path("out/checkpoints")) == before


def test_every_flipped_bit_of_a_checkpoint_is_found(arguments):
    """One at a time, seeded, wherever it is; also in the manifest, where only spaces do not matter."""
    assert launch.main("sft", arguments) == 0
    folder, random = Path("out/checkpoints/step_00000002"), np.random.default_rng(0)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in (*files, *[folder / "isoloss.json"] * 30):
        content = file.read_bytes()
        spots = [i for i, byte in enumerate(content) if file.name != "isoloss.json" or chr(byte) not in " \n"]
        for spot in random.choice(spots, 5):
            flipped = bytearray(content)
            flipped[spot] ^= 1 << random.integers(8)
            file.write_bytes(flipped)
            with pytest.raises(UserError, match=rf"{file.name}|lacks"):
                manifest.check_checksums(folder, manifest.read(folder))
        file.write_bytes(content)


def test_the_same_rows_elsewhere_are_the_same_run(own):
    """Another path, another name, and a limit that no row meets."""
    folder, argv = own
    assert launch.main("sft", argv) == 0
    (folder / "rows.jsonl").rename(folder / "moved.jsonl")
    moved = ["data.train=mine/moved.jsonl", "data.max_length=130", "checkpoint.resume=true", "train.steps=3"]
    assert launch.main("sft", [*argv, *moved]) == 0


def test_a_checkpoint_that_does_not_tell_its_rows(own, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop.RunData, "fingerprints", lambda data: [])  # as it was once
        assert launch.main("sft", own[1]) == 0
    capsys.readouterr()
    assert launch.main("sft", [*own[1], "checkpoint.resume=true"]) == 2
    says = ("does not tell the content of data.train", "an earlier isoloss", "model.path=out/checkpoints/step_00000002")
    err = capsys.readouterr().err
    assert all(part in err for part in says), err


# ---- folders --------------------------------------------------------------------------------------------------------


def test_a_kill_while_saving(train, inputs, tmp_path):
    """The half-written checkpoint is never chosen, the run goes on from the one before it, and no trace remains."""
    whole, parts = (config_of(inputs, tmp_path / name, "dp2", "fp32", True) for name in ("whole", "parts"))
    expected = train(whole, "dp2")
    train(parts, "dp2", killed_in_save=STEPS)
    folder = Path(parts.output_dir, "checkpoints")
    assert len(list(folder.iterdir())) == 2  # step 4, and what the kill left
    assert checkpoint.newest_first(folder) == [folder / "step_00000004"]
    assert world.same(train(resumed(parts), "dp2"), expected)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000004", "step_00000008"]
    assert numbers(parts.output_dir) == numbers(whole.output_dir)


@pytest.mark.parametrize("named", ("nothing", "the same", "the same, to resume"))
def test_two_runs_at_once(pool, inputs, tmp_path, named):
    """Each has a folder of its own, or is told on every rank."""
    config = config_of(inputs, tmp_path / "out", "dp2", "fp32", None)
    if named == "nothing":
        config = dataclasses.replace(config, output_dir=None)
    found = pool.run(2, world.at_once, resumed(config) if "resume" in named else config, str(tmp_path))
    out = f"{tmp_path}/out"
    told = f"output_dir={out} is being written by another run; wait for its end, or choose another output_dir"
    assert set(found) == {("runs/test", "runs/test-2") if named == "nothing" else (out, told)}


def test_a_killed_run_leaves_its_folder_to_the_next(tmp_path):
    def hold_until_killed(ready):
        with run_folder._alone(tmp_path):
            ready.set()
            signal.pause()

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold_until_killed, args=(ready,), daemon=True)
    process.start()
    assert ready.wait(60)
    with pytest.raises(UserError, match="another run"), run_folder._alone(tmp_path):
        raise AssertionError("two have it")
    process.kill()
    process.join()
    with run_folder._alone(tmp_path):
        pass


def test_only_the_newest_checkpoints_stay(arguments):
    argv = [*arguments, "train.steps=5", "checkpoint.every=1", "checkpoint.keep=2"]
    assert launch.main("sft", argv) == 0
    folder = Path("out/checkpoints")
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000004", "step_00000005"]


def test_prune_after_a_kill(tmp_path):
    """What a kill in the middle of a prune or of a save leaves behind goes with the next prune."""
    for name in ("step_00000001", "step_00000002", "step_00000003", ".step_00000001.old", ".step_00000004.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "isoloss.json").touch()
    assert checkpoint.newest_first(tmp_path)[0] == tmp_path / "step_00000003"
    checkpoint.prune(tmp_path / "step_00000003", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000003"]


def beside(checkpoints: Path, elsewhere: Path) -> list[str]:
    """Put what is no checkpoint into the folder of checkpoints; return the names."""
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    for name in (
        "step_best",
        "step_10_copy",
        "step_",
        "step_00000003.bak",
        "step_1_2",
        ".step_best.old",
        "step_-1",
    ):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "isoloss.json").touch()
    for name in ("step_00000050", ".step_00000007.old", ".step_00000007.partial"):
        (checkpoints / name).symlink_to(elsewhere)
    (checkpoints / "step_00000060").symlink_to("nothing")
    for name in ("step_00000005", ".step_00000005.old", "step_00000004.txt"):
        (checkpoints / name).touch()
    return sorted(path.name for path in checkpoints.iterdir())


def test_prune_deletes_checkpoints_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    others = beside(folder, tmp_path / "elsewhere")
    for step in (1, 2, 4):
        (folder / f"step_{step:08d}").mkdir()
    assert [path.name for path in checkpoint.newest_first(folder)] == [f"step_{step:08d}" for step in (4, 2, 1)]
    checkpoint.prune(folder / "step_00000004", 1)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*others, "step_00000004"])
    assert (tmp_path / "elsewhere/kept").exists()


@pytest.mark.parametrize(("keep", "left"), ((1, [6, 99]), (2, [3, 6, 99]), (3, [2, 3, 6, 99]), (9, [1, 2, 3, 6, 99])))
def test_the_checkpoint_just_written_stays(keep, left, tmp_path):
    """Another run left a checkpoint of a higher number: it is not older than the one just written, and stays."""
    for step in (1, 2, 3, 6, 99):
        (tmp_path / f"step_{step:08d}").mkdir()
    checkpoint.prune(tmp_path / "step_00000006", keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in left]


def test_steps_are_numbers(tmp_path):
    """Not words: nine digits are more than eight."""
    for step in (99_999_999, 100_000_000, 7):
        (tmp_path / f"step_{step:08d}").mkdir()
    assert checkpoint.newest_first(tmp_path)[0].name == "step_100000000"
    checkpoint.prune(tmp_path / "step_100000000", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_100000000"]


def test_a_link_of_the_name_is_not_written_over(tmp_path):
    (tmp_path / "step_00000001").symlink_to("nothing")
    with pytest.raises(UserError, match="exists already"):
        checkpoint.stage(tmp_path / "step_00000001", None, None, None, {})


def test_a_run_goes_on_beside_a_copy_of_a_checkpoint(arguments):
    """keep=1 and a user's `step_best`: the newest is gone on from, the one just saved stays, the copy too."""
    argv = [*arguments, "checkpoint.every=1", "checkpoint.keep=1"]
    assert launch.main("sft", [*argv, "train.steps=2"]) == 0
    folder = Path("out/checkpoints")
    shutil.copytree(folder / "step_00000002", folder / "step_best")
    assert launch.main("sft", [*argv, "train.steps=3", "checkpoint.resume=true"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_best"]


def test_a_finished_run_can_be_made_longer(arguments, inputs, capsys):
    """The exported model is that of the new end; nothing is printed twice; "before training" is before the first start,
    but with other rows, whose losses do not compare."""
    held_out = [f"data.eval={inputs}/rows.jsonl" if word.startswith("data.eval=") else word for word in arguments]
    argv = [*held_out, "optim.schedule=constant", "optim.lr=1e-2"]
    assert launch.main("sft", argv) == 0
    before = Path("out/hf/model.safetensors").read_bytes()
    assert launch.main("sft", [*argv, "checkpoint.resume=true"]) == 0  # nothing left to do
    assert Path("out/hf/model.safetensors").read_bytes() == before
    assert launch.main("sft", [*argv, "checkpoint.resume=true", "train.steps=3"]) == 0
    assert Path("out/hf/model.safetensors").read_bytes() != before
    steps = [json.loads(line)["step"] for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    evaluations = {row["step"]: row["loss"] for row in map(json.loads, Path("out/eval.jsonl").read_text().splitlines())}
    assert f"(before training {evaluations[0]:.3f})" in capsys.readouterr().out.splitlines()[-2]
    assert round(evaluations[0], 3) != round(evaluations[2], 3)
    shutil.copy(f"{inputs}/rows.jsonl", "others.jsonl")
    others = [*(word for word in argv if not word.startswith("data.eval=")), "data.eval=others.jsonl"]
    assert launch.main("sft", [*others, "checkpoint.resume=true", "train.steps=4"]) == 0
    assert f"(before training {evaluations[3]:.3f})" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize("distributed_optimizer", (True, False), ids=("distopt", "plainopt"))
def test_a_checkpoint_before_the_first_step(pool, inputs, tmp_path, distributed_optimizer):
    config = config_of(inputs, tmp_path / "unused", "dp2", "fp32", distributed_optimizer)
    straight, loaded = (
        pool.run(2, world.first_step, config, folder) for folder in (None, str(tmp_path / "step_00000000"))
    )
    assert straight == loaded


def test_resume_without_a_run_starts_one(arguments):
    assert launch.main("sft", [*arguments, "checkpoint.resume=true"]) == 0
    assert Path("out/hf").is_dir()
