"""A mistake of the user ends a reinforcement learning run with status 2 and one line, before anything is written."""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.runs import rl_runs as world
from support.runs import warm
from support.runs.runs import typed, write_rows

from isoloss.recipes import launch


@dataclass(frozen=True)
class Mistake:
    """Overrides on top of a run that works, and what the line must say. `{inputs}` stands for the folder of inputs."""

    name: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]


def told(name: str, overrides: str | tuple[str, ...], *says: str) -> Mistake:
    return Mistake(name, (overrides,) if isinstance(overrides, str) else overrides, says)


CONFIGURATION = (
    told("misspelt key", "algorithm.clip_hi=0.3", "'algorithm.clip_hi'", "did you mean 'algorithm.clip_high'"),
    told("key of another group", "train.num_generations=4", "did you mean 'rollout.num_generations'"),
    told("the recipe's own key as SFT has none", "rollout.temprature=1", "did you mean 'rollout.temperature'"),
    told("wrong type", "rollout.num_generations=many", "rollout.num_generations='many'", "an integer"),
    told("not among the choices", "algorithm.advantage=ppo", "algorithm.advantage='ppo'", "grpo", "gae"),
    told("minibatches", "algorithm.minibatches=3", "algorithm.minibatches=3", "8 completions", "batch.global_size=2"),
    told("a group of one", "rollout.num_generations=1", "rollout.num_generations=1", "algorithm.advantage=grpo"),
    told("greedy", "rollout.temperature=0", "rollout.temperature=0.0", "above 0"),
    told("truncate", "data.overlong=truncate", "data.overlong='truncate'", "error or drop"),
    told("sglang without servers", "rollout.backend=sglang", "rollout.servers=[]", "http://"),
    told("server without a scheme", ("rollout.backend=sglang", "rollout.servers=[host:1]"), "'host:1'", "http://"),
    told("weights", "reward.weights=[1,2]", "reward.weights=[1.0, 2.0]", "as many as the 1"),
    told("overlong buffer", "algorithm.overlong_buffer=13", "algorithm.overlong_buffer=13", "max_new_tokens=12"),
    told("correction counted twice", ("algorithm.importance=token", "algorithm.old_logprobs=rollout"), "twice"),
)  # fmt: skip

ROOM = (
    told(
        "completion fills data.max_length", "rollout.max_new_tokens=128",
        "max_new_tokens=128", "data.max_length=128", "such as to 64, or raise data.max_length",
    ),
    told(
        "completion fills the context",
        ("rollout.max_new_tokens=256", "data.max_length=999"),
        "rollout.max_new_tokens=256", "max_position_embeddings=256", "to 128, or take a model with more positions",
    ),
    told("prompt over data.max_length", "data.max_length=24", "prompts.jsonl:3", "data.max_length", "overlong=drop"),
    told("every prompt dropped", ("data.max_length=14", "data.overlong=drop"), "all 5 prompts", "data.max_length"),
)  # fmt: skip

REWARD = (
    told("misspelt built-in", "reward.function=exact_mach", "reward.function=exact_mach", "did you mean exact_match?"),
    told("no such file", "reward.function=nowhere.py:f", "reward.function=nowhere.py:f"),
    told("no such package", "reward.function=no.such.package:f", "no.such.package:f", "PYTHONPATH"),
    told("no such function", "reward.function={inputs}/rewards.py:halves", "rewards.py:halves"),
    told("wrong signature", "reward.function={inputs}/bad_rewards.py:asks", "'colour'", "add that column"),
    told("not a function", "reward.function={inputs}/bad_rewards.py:NUMBER", "bad_rewards.py:NUMBER"),
    told("not Python", "reward.function={inputs}/broken.py:f", "broken.py:f", "SyntaxError"),
)  # fmt: skip

BAD_REWARDS = """
NUMBER = 1

def asks(completion, colour):
    return 0

def short(prompts, completions):
    return [0.0] * (len(completions) - 1)
"""

# (name, the second line of a file of prompts, what the message says besides file and line)
ROWS = (
    ("empty text", '{"prompt": ""}', ("`prompt` is empty",)),
    ("blank text", '{"prompt": " \\n"}', ("`prompt` is empty",)),
    ("no messages", '{"prompt": []}', ("`prompt`",)),
    ("empty messages", '{"messages": [{"role": "user", "content": ""}]}', ("`messages` has no content",)),
    ("no prompt", '{"title": "a", "answer": "b"}', ("no prompt", "answer, title")),
    ("the answer is given away", '{"prompt": [{"role": "assistant", "content": "b"}]}', ("assistant's turn",)),
    ("not JSON", '{"prompt": ', ("not JSON",)),
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = world.write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "bad_rewards.py").write_text(BAD_REWARDS)
    (folder / "broken.py").write_text("def f(completion:\n")
    return folder


@pytest.fixture
def arguments(inputs, tmp_path, monkeypatch) -> list[str]:
    """Overrides for a run of three steps in the empty folder `tmp_path/work`, which becomes the working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return world.overrides_of(inputs, "out")


def complain(capsys, argv: list[str]) -> str:
    """The one line that the recipe says about `argv`, without its prefix; nothing has been written."""
    capsys.readouterr()
    status = launch.main("grpo", argv)
    out, err = capsys.readouterr()
    assert status == 2, err
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("isoloss: error: "), err
    assert out == "" and list(Path.cwd().iterdir()) == []
    return lines[0].removeprefix("isoloss: error: ")


@pytest.mark.parametrize("mistake", (*CONFIGURATION, *ROOM, *REWARD), ids=lambda m: m.name)
def test_overrides(mistake, inputs, arguments, capsys):
    line = complain(capsys, [*arguments, *(text.replace("{inputs}", str(inputs)) for text in mistake.overrides)])
    for part in mistake.says:
        assert part.replace("{inputs}", str(inputs)) in line, line


@pytest.mark.parametrize("key", ("data.train", "data.eval"))
@pytest.mark.parametrize(("row", "says"), [case[1:] for case in ROWS], ids=[case[0] for case in ROWS])
def test_rows(row, says, key, tmp_path, arguments, capsys):
    file = write_rows(tmp_path / "bad.jsonl", [{"prompt": "1 + 1 =", "answer": 2}, row])
    line = complain(capsys, [*arguments, f"{key}={file}"])
    assert line.startswith(f"{file}:2: "), line
    assert all(part in line for part in says), line


def test_no_token_ends_a_completion(inputs, tmp_path, arguments, capsys):
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    (model / "generation_config.json").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": None}
    (model / "config.json").write_text(json.dumps(config))
    line = complain(capsys, [*arguments, f"model.path={model}"])
    assert str(model) in line and "eos_token" in line


@pytest.mark.parametrize(
    ("name", "text", "says"),
    (
        ("generation_config.json", "{bad", "is not valid JSON"),
        ("generation_config.json", "[]", "must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "3"}', "eos_token_id='3'"),
        ("generation_config.json", '{"eos_token_id": [2, 99999999]}', "99999999 is none of 0 to "),
        ("tokenizer_config.json", "[]", "does not load"),
        ("chat_template.jinja", "{% for m in messages %}{{ m.role }", "is not one"),
    ),
)
def test_broken_files_of_the_model(name, text, says, inputs, tmp_path, arguments, capsys):
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    (model / name).write_text(text)
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "1 + 1 ="}], "answer": 2}\n')
    line = complain(capsys, [*arguments, f"model.path={model}", f"data.train={tmp_path}/chat.jsonl"])
    assert str(model) in line and says in line


def test_bad_prompts_can_be_left_out(inputs, tmp_path, arguments, capsys):
    train = tmp_path / "prompts.jsonl"
    train.write_text((inputs / "prompts.jsonl").read_text() + '{"prompt": 3}\n')
    argv = [*arguments, f"data.train={train}", "data.max_rejects=1", "train.steps=1"]
    assert launch.main("grpo", argv) == 0
    assert "data: 1 bad row left out, see out/rejects.jsonl\n" in capsys.readouterr().out
    (reject,) = [json.loads(line) for line in Path("out/rejects.jsonl").read_text().splitlines()]
    assert (reject["split"], reject["place"]) == ("data.train", f"{train}:6") and "int 3" in reject["reason"]


def test_overlong_prompts_can_be_dropped(arguments, capsys):
    """What the line about overlong prompts proposes works."""
    assert launch.main("grpo", [*arguments, "data.max_length=24", "data.overlong=drop"]) == 0
    assert "3 dropped for their length" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("out/rollouts.jsonl").read_text().rstrip("\n").split("\n")]
    assert {row["id"].partition("/")[0] for row in rows} == {"prompts.jsonl:1", "prompts.jsonl:2"}


# ---- through torchrun -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says", "written"),
    (
        ("data.max_length=24", "prompts.jsonl:3: the prompt's", False),
        ("reward.function=nowhere.py:f", "reward.function=nowhere.py:f", False),
        ("reward.function={inputs}/bad_rewards.py:short", "returned 7 rewards for 8 completions", True),
    ),
    ids=("found by every rank", "found by rank 0 before the others know it", "found by rank 0 amid the run"),
)
def test_two_ranks_say_it_once(override, says, written, inputs, arguments, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = warm.run(
        [*command, "-m", "isoloss.recipes.grpo", *typed(*arguments, override.replace("{inputs}", str(inputs)))],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        check=False,
        timeout=300,  # a rank that waits for one that has ended would wait for longer
    )
    assert done.returncode == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
    from_ranks = [line for line in done.stderr.splitlines() if line.startswith("isoloss: ")]
    assert len(from_ranks) == 1 and says in from_ranks[0], done.stderr
    assert "isoloss/" not in done.stderr.split("isoloss: error: ")[0]  # no traceback through our own code
    assert Path("out").exists() == written
