"""A reinforcement learning run that goes on is the run without the interruption, wherever that happened."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.runs import rl_runs as world
from support.runs.rl_runs import config_of
from support.runs.runs import metrics_of, numbers, resumed
from support.runs.training import merged, same

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import Layout, UserError
from isoloss.recipes import launch

FOUR_STEPS_A_BATCH = ("algorithm.minibatches=2", "algorithm.epochs=2", "train.steps=6")
REFERENCE = ("algorithm.kl_coef=0.1",)
CRITIC = ("algorithm.advantage=gae", "algorithm.critic_lr=1e-2", "algorithm.gae_lambda=0.9")
ADAPTER, MEGATRON = ("lora.rank=4", "optim.lr=3e-2"), ("rollout.backend=megatron",)
# Rewards of 0 and 1 for two completions: about half of the groups are dropped.
DYNAMIC = ("algorithm.dynamic_sampling=true", "rollout.num_generations=2", "reward.function={inputs}/rewards.py:coin")
# (name, overrides, checkpoint.every, step after which the run is killed). Five prompts, two in a batch: the second
# epoch of prompts begins within the third batch.
CASES = (
    ("between batches, across the border of an epoch", ("train.steps=4",), 2, 3),
    ("after the first mini-batch", FOUR_STEPS_A_BATCH, 1, 5),
    ("after the first epoch of a batch", ("train.steps=8", *FOUR_STEPS_A_BATCH[:2]), 2, 7),
    ("reference", (*REFERENCE, *FOUR_STEPS_A_BATCH), 3, 5),
    ("reference in the reward", (*REFERENCE, "algorithm.kl_in=reward", "algorithm.minibatches=2"), 1, 2),
    ("old log-probabilities of the rollout", ("algorithm.old_logprobs=rollout", *FOUR_STEPS_A_BATCH), 3, 5),
    ("dynamic sampling", (*DYNAMIC, "algorithm.minibatches=2", "train.steps=6"), 3, 5),
    ("critic", (*CRITIC, *FOUR_STEPS_A_BATCH), 3, 5),
    ("adapter", (*ADAPTER, *REFERENCE, *FOUR_STEPS_A_BATCH), 3, 5),
    ("adapters of policy and critic, in process", (*ADAPTER, *CRITIC, *MEGATRON, *FOUR_STEPS_A_BATCH), 3, 5),
    ("evaluations", (*FOUR_STEPS_A_BATCH, "data.eval={inputs}/prompts.jsonl", "train.eval_every=3"), 3, 5),
)
EVERYTHING = (*CRITIC, *REFERENCE, *DYNAMIC, *FOUR_STEPS_A_BATCH, "rollout.temperature=0.7")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return world.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def check(pool, inputs, tmp_path):
    """Run it whole, run it with a kill and a resume, and compare every number, completion and weight, bit for bit."""

    def run(layout: str, overrides: tuple[str, ...], every: int, **kill: int) -> tuple[RLConfig, RLConfig]:
        named = [override.replace("{inputs}", str(inputs)) for override in overrides]
        whole, parts = (
            config_of(inputs, tmp_path / name, layout, *named, f"checkpoint.every={interval}")
            for name, interval in (("whole", 0), ("parts", every))
        )
        size = Layout.parse(layout).world_size
        expected = merged(pool.run(size, world.train, whole))
        pool.run(size, world.train, *(parts, kill.get("after"), kill.get("in_save")))
        found = merged(pool.run(size, world.train, resumed(parts)))
        assert numbers(parts.output_dir) == numbers(whole.output_dir)
        for name in ("rollouts", *(("eval", "eval_rollouts") if whole.data.eval else ())):
            assert metrics_of(parts, name) == metrics_of(whole, name)
        assert same(found, expected)
        return whole, parts

    return run


@pytest.mark.parametrize(("overrides", "every", "after"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_resume_is_exact(check, overrides, every, after):
    """Same prompts, completions, rewards, losses, gradient norms and weights; every step and completion told once."""
    whole, _ = check("1", overrides, every, after=after)
    rows = metrics_of(whole)
    assert [row["step"] for row in rows] == list(range(1, whole.train.steps + 1))
    assert len({row["grad_norm"] for row in rows}) == len(rows)  # no two steps are alike: the run does move
    rollouts = metrics_of(whole, "rollouts")
    assert len({row["id"] for row in rollouts}) == len(rollouts)


@pytest.mark.parametrize("layout", ("tp2", "pp2", "ulysses2", "dp2"))
def test_resume_is_exact_on_every_layout(check, layout):
    check(layout, EVERYTHING, 3, after=5)


def test_what_was_dropped_and_drawn_again_is_the_same(check, inputs):
    """The cases with dynamic sampling mean something: groups were dropped, and told."""
    whole, _ = check("1", (*DYNAMIC, "train.steps=4"), 1, after=2)
    rows = metrics_of(whole)
    assert sum(row["groups_dropped"] for row in rows) > 0
    assert (
        rows[-1]["prompts_drawn"] == len(metrics_of(whole, "rollouts")) / 2 == sum(row["groups_drawn"] for row in rows)
    )


@pytest.mark.parametrize("keep", (1, 2))
def test_a_kill_between_the_checkpoints_of_critic_and_policy(check, keep):
    """The critic's older checkpoint is still there, and its newer one is made again."""
    _, parts = check("1", (*CRITIC, "train.steps=3", f"checkpoint.keep={keep}"), 1, in_save=2)
    folders = [Path(str(parts.output_dir), name) for name in ("checkpoints", "critic_checkpoints")]
    assert [[path.name for path in sorted(folder.iterdir())] for folder in folders] == [
        [checkpoint.STEP_FOLDER.format(step) for step in (1, 2, 3)[-keep:]]
    ] * 2


@pytest.mark.parametrize(
    ("override", "says"),
    (
        ("rollout.num_generations=2", ("rollout.num_generations=2", "differs from the 4")),
        ("rollout.max_new_tokens=11", ("rollout.max_new_tokens=11", "differs from the 12")),
        ("rollout.temperature=0.9", ("rollout.temperature=0.9", "differs from the 1.0")),
        ("reward.function=exact_match", ("reward.function=['exact_match']", "differs from", "rewards.py:quarters")),
        ("reward.weights=[2]", ("reward.weights=[2.0]", "differs from the []")),
        ("batch.global_size=4", ("batch.global_size=4", "differs from the 2")),
        ("train.seed=1", ("train.seed=1", "differs from the 0")),
        ("algorithm.advantage=rloo", ("algorithm.advantage='rloo'", "differs from the 'grpo'")),
        ("algorithm.minibatches=2", ("algorithm.minibatches=2", "differs from the 1")),
        ("algorithm.epochs=2", ("algorithm.epochs=2", "differs from the 1")),
        ("algorithm.old_logprobs=rollout", ("algorithm.old_logprobs='rollout'", "differs from the 'train'")),
        ("algorithm.dynamic_sampling=true", ("algorithm.dynamic_sampling=True", "differs from the False")),
        ("algorithm.kl_in=reward", ("algorithm.kl_in='reward'", "differs from the 'loss'")),
        ("algorithm.kl_coef=0.1", ("use of algorithm.kl_coef (above 0)=True", "differs from the False")),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_run_is_refused(finished, override, says, capsys):
    arguments, folder = finished
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert launch.main("grpo", [*arguments, "checkpoint.resume=true", override]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert all(part in err for part in (*says, "step_00000003", "another run")), err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def own(inputs, tmp_path) -> tuple[Path, list[str]]:
    """A folder of inputs that a test may change, and the overrides of a run with them."""
    shutil.copytree(inputs, tmp_path / "mine")
    return tmp_path / "mine", [*world.overrides_of(tmp_path / "mine", tmp_path / "run"), "train.steps=1"]


def edited(name: str, old: str, new: str):
    """A change of a file of the folder."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def other_vocabulary(folder: Path) -> None:
    """Two tokens that no prompt has have changed places."""
    path = folder / "model" / "tokenizer.json"
    spec = json.loads(path.read_text())
    words = spec["model"]["vocab"]
    words["\u0120removed"], words["Hel"] = words["Hel"], words["\u0120removed"]
    path.write_text(json.dumps(spec))


@pytest.mark.parametrize(
    ("change", "says"),
    (
        (edited("prompts.jsonl", "1 + 1 =", "2 + 1 ="), "the content of data.train"),
        (edited("prompts.jsonl", '"answer": 2', '"answer": 3'), "the content of data.train"),
        (edited("prompts.jsonl", '"answer": 2', '"answer": 2, "level": 1'), "the content of data.train"),
        (edited("model/generation_config.json", "[3,", "[4,"), "tokens that end a completion"),
        (other_vocabulary, "the vocabulary"),
    ),
    ids=("prompt", "answer", "column of a reward", "stop tokens", "vocabulary"),
)
def test_other_prompts_are_another_run(own, change, says, capsys):
    folder, argv = own
    assert launch.main("grpo", argv) == 0
    change(folder)
    capsys.readouterr()
    assert launch.main("grpo", [*argv, "checkpoint.resume=true", "train.steps=2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert all(part in err for part in (says, "step_00000001", "another run", "set it back")), err


def test_the_same_prompts_elsewhere_are_the_same_run(own):
    folder, argv = own
    assert launch.main("grpo", argv) == 0
    (folder / "elsewhere").mkdir()
    (folder / "prompts.jsonl").rename(folder / "elsewhere" / "prompts.jsonl")
    moved = [f"data.train={folder}/elsewhere/prompts.jsonl", "checkpoint.resume=true", "train.steps=2"]
    assert launch.main("grpo", [*argv, *moved]) == 0


def test_another_reference_is_another_run(pool, own, tmp_path):
    """One weight of the initial policy has changed in its file. The layout, and how files divide it, do not matter."""
    folder, _ = own
    made = config_of(folder, tmp_path / "made", "1", "checkpoint.export_hf=true", "train.steps=1")
    pool.run(1, world.train, made)
    start = (f"model.path={tmp_path}/made/hf", "model.from_scratch=false", *REFERENCE)
    config = config_of(folder, tmp_path / "run", "1", *start, "train.steps=1")
    pool.run(1, world.train, config)
    pool.run(2, world.train, resumed(config_of(folder, tmp_path / "run", "dp2", *start, "train.steps=2")))
    path = tmp_path / "made" / "hf" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] += 1
    save_file(weights, path, {"format": "pt"})
    again = resumed(config_of(folder, tmp_path / "run", "1", *start, "train.steps=3"))
    with pytest.raises(UserError, match=r"the reference .the weights of model.path. is not what .*step_00000002"):
        pool.run(1, world.train, again)


@pytest.fixture(scope="module")
def finished(pool, inputs, tmp_path_factory) -> tuple[list[str], Path]:
    """The overrides of a run that has ended, and its folder."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    pool.run(1, world.train, config_of(inputs, folder))
    return world.overrides_of(inputs, folder), folder


def test_knobs_of_the_loss_alone_may_change(pool, inputs, tmp_path):
    config = config_of(inputs, tmp_path / "run")
    pool.run(1, world.train, config)
    changed = (
        "optim.lr=1e-3",
        "algorithm.clip_high=0.3",
        "algorithm.loss=cispo",
        "train.steps=4",
        "train.eval_every=1",
    )
    pool.run(1, world.train, resumed(config_of(inputs, tmp_path / "run", "1", *changed)))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["lr"]) for row in rows] == [(1, 1e-2), (2, 1e-2), (3, 1e-2), (4, 1e-3)]
