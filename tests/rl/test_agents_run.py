"""Whole runs of an agent that branches, has faults and credits turns: on one rank and on two."""

import math
from pathlib import Path

import pytest
from support.runs import agents
from support.runs.runs import write_rows

SORT = Path(__file__).parents[2] / "recipes" / "assets" / "sort"
AGENT = """
import pathlib

async def agent(session, row):
    messages, first = list(row["prompt"]), pathlib.Path(__file__).parent / session.id.replace("/", "_")
    for turn in range(2):
        reply = await session.chat(messages)
        messages += [reply, {"role": "tool", "content": str(turn)}]
        if turn == 0 and session.id.endswith("/1") and not first.exists():
            first.touch()
            raise session.Fault("once")
    # Its history is rewritten: a branch of its own.
    reply = await session.chat([*row["prompt"], {"role": "user", "content": "again"}])
    if session.id.endswith("/2") and "/1/" in session.id:
        raise session.Fault("always")
    return [(0, (session.seed % 5) / 5), (2, float(len(reply["content"]) % 3))]
"""


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> dict:
    """Return (metrics, lines) of runs by (world, backend)."""
    found = {}
    for world, backend in ((1, "megatron"), (2, "megatron"), (1, "transformers")):
        folder = tmp_path_factory.mktemp(f"agents-{world}-{backend}")
        model = folder / "model"
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (model / name).write_bytes((SORT / name).read_bytes())
        rows = [{"prompt": [{"role": "user", "content": f"go {n}"}], "answer": str(n)} for n in range(4)]
        write_rows(folder / "train.jsonl", rows)
        (folder / "agent.py").write_text(AGENT)
        found[world, backend] = pool.run(world, agents.run, folder, backend)[0]
    return found


KINDS = [(1, "megatron"), (2, "megatron"), (1, "transformers")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_that_was_made_is_a_target_once(runs, kind):
    metrics, lines = runs[kind]
    assert len(metrics) == 2 and len(lines) == 12
    for row in metrics:
        kept = [line for line in lines if line["step"] == row["step"]]
        assert row["valid_tokens"] == sum(line["tokens"] for line in kept if not line["masked"])
        assert row["sequences"] == len(kept) == 6  # trajectories, each of two samples


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_agrees_with_the_backend_at_every_target(runs, kind):
    for row in runs[kind][0]:
        assert row["train_rollout_logprob_diff_max"] < 1e-4 and math.isfinite(row["loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_counted_and_no_rewards(runs, kind):
    lines = {line["id"]: line for line in runs[kind][1]}
    for id, line in lines.items():
        lost = id.endswith("/1/2")
        assert line["tries"] == (2 if id.endswith("/1") or lost else 1), id
        assert (line["reward"] is None) == lost and line["masked"] == lost
        assert len(line["turns"]) == 3 and not any("excluded" in turn for turn in line["turns"])
    assert sum(line["reward"] is None for line in lines.values()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_sessions(runs, kind):
    first, second = runs[kind][0]
    assert [row["turns_mean"] for row in (first, second)] == [3, 3]
    assert [row["sessions_lost"] for row in (first, second)] == [1, 0]
    assert [row["sessions_faulted"] for row in (first, second)] == [3, 2]
    assert first["turns_appended"] + first["turns_spliced"] == 6 and first["prompts_dropped_faulted"] == 0


def test_two_ranks_give_the_numbers_of_one(runs):
    (one, lines), (two, same) = runs[1, "megatron"], runs[2, "megatron"]
    assert [(line["id"], line["messages"], line["reward"]) for line in lines] == [
        (line["id"], line["messages"], line["reward"]) for line in same
    ]
    for row, other in zip(one, two):
        assert other["loss"] == pytest.approx(row["loss"], abs=1e-6)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
