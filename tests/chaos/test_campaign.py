"""`make chaos` runs: a few rows of it, and what its checks refuse."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chaos import checks, run, soak
from chaos.job import Job
from chaos.kinds import grpo
from support.runs.runs import write_rows

STEPS, KEEP = 3, 2
A, B = "row:1/0/0", "row:2/1/0"  # completions of the first draws


@pytest.mark.slow
def test_a_run_is_killed_and_damaged(tmp_path, capsys):
    """In a save, and between two starts; the table has a line for each."""
    rows = ["in a save, all but the name", "a bit flipped"]
    assert run.main(["--kinds", "grpo", "--folder", str(tmp_path), "--seed", "1", "--only", *rows]) == 0
    *_, last = said = capsys.readouterr().out.splitlines()
    assert last.startswith("4 done, 0 failed") and "FAILED" not in " ".join(said)
    names = ("undisturbed", "kill the trainer", "damage the newest checkpoint", "to its end")
    told = [line for line in said if line.startswith("GRPO in process  ")]
    assert len(told) == 4 and all(any(f"  {name}  " in line for line in told) for name in names)


def test_what_fails_is_told_with_its_seed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Job, "wait_long", lambda job: 1)
    monkeypatch.setattr(Job, "start", lambda job: (job.folder / "said-000").touch() or setattr(job, "starts", 1))
    assert run.main(["--kinds", "grpo", "--folder", str(tmp_path), "--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "FAILED: undisturbed: AssertionError: status 1:; again: --seed 7 --kinds grpo" in said
    assert "1 done, 1 failed" in said


# ---- the checks -----------------------------------------------------------------------------------------------------


def row(step: int, out: Path) -> dict:
    return {"step": step, "loss": 1 / step, "seconds": id(out), "prompts_drawn": 3, "prompts_in_flight": 1}


def metrics(out: Path, *steps: int) -> None:
    write_rows(out / "metrics.jsonl", [row(step, out) for step in steps])


def completions(out: Path, *rows: tuple[int, str, int]) -> None:
    """rows: step, id, and the version of the weights that it is of."""
    lines = [{"step": step, "id": id, "weight_versions": [version]} for step, id, version in rows]
    write_rows(out / "rollouts.jsonl", lines)


@pytest.fixture
def jobs(tmp_path) -> tuple[Job, Job]:
    """A run that was disturbed and one that was not, as they should be at their ends."""
    made = []
    for name in ("disturbed", "undisturbed"):
        job = Job(grpo(tmp_path), tmp_path / name, STEPS, KEEP)
        for step in (2, 3):
            (job.out / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        (job.out / "hf").mkdir()
        (job.out / "hf/model.safetensors").write_bytes(b"weights")
        metrics(job.out, 1, 2, 3)
        completions(job.out, (1, A, 0), (3, B, 2))
        for file in ("eval.jsonl", "eval_rollouts.jsonl"):
            write_rows(job.out / file, [{"step": 0}])
        (job.folder / "said-000").write_text("resumed after step 2\n")
        job.starts, job.newest = 1, 2
        made.append(job)
    checks.at_the_end(*made)
    return made[0], made[1]


def checkpoint(job: Job, name: str) -> None:
    (job.out / "checkpoints" / name).mkdir()


SPOILED = {
    "a step twice": lambda job: metrics(job.out, 1, 2, 2, 3),
    "a step left out": lambda job: metrics(job.out, 1, 3),
    "fewer steps than were saved": lambda job: metrics(job.out, 1, 2),
    "another number": lambda job: write_rows(job.out / "metrics.jsonl", [{"step": 1, "loss": 7}]),
    "a completion too many": lambda job: completions(job.out, (1, "row:3/2/0", 0)),
    "resumed from an older one": lambda job: (job.folder / "said-000").write_text("resumed after step 1\n"),
    "nothing was saved": lambda job: shutil.rmtree(job.out / "checkpoints"),
    "old ones are kept": lambda job: [checkpoint(job, f"step_{step:08d}") for step in (0, 1)],
    "killed saves pile up": lambda job: [checkpoint(job, f".step_{step:08d}.partial") for step in (4, 5, 6)],
}
SPOILED_END = {
    "an evaluation is missing": lambda job: (job.out / "eval.jsonl").write_text(""),
    "another weight": lambda job: (job.out / "hf/model.safetensors").write_bytes(b"weightz"),
    "a killed save is left": lambda job: checkpoint(job, ".step_00000002.partial"),
    "a file that none should have": lambda job: checkpoint(job, "strange"),
    "one too many": lambda job: checkpoint(job, "step_00000001"),
}


SPOILED_INEXACT = {
    "a prompt twice": lambda job: completions(job.out, (1, A, 0), (3, A, 2)),
    "of stale weights": lambda job: completions(job.out, (1, A, 0), (3, B, 1)),
    "a prompt is lost": lambda job: completions(job.out, (1, A, 0), (3, "row:3/2/0", 2)),
    "a prompt that the ledger does not know": lambda job: completions(job.out, (1, A, 0), (3, B, 2), (3, "c/2/0", 2)),
    "of another policy": lambda job: write_rows(
        job.out / "metrics.jsonl",
        [row(step, job.out) | {"train_rollout_logprob_diff": 1e-3 * (step > 2)} for step in (1, 2, 3)],
    ),
    "a step left out": lambda job: metrics(job.out, 1, 3),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_must_hold_at_any_time(spoil, jobs):
    disturbed, undisturbed = jobs
    spoil(disturbed)
    with pytest.raises(AssertionError):
        checks.so_far(disturbed, undisturbed)


@pytest.mark.parametrize("spoil", SPOILED_END.values(), ids=SPOILED_END)
def test_what_must_hold_at_the_end(spoil, jobs):
    disturbed, undisturbed = jobs
    spoil(disturbed)
    checks.so_far(disturbed, undisturbed)
    with pytest.raises(AssertionError):
        checks.at_the_end(disturbed, undisturbed)


def test_a_run_that_is_ahead_may_have_tokens_of_older_weights(jobs):
    disturbed, undisturbed = jobs
    disturbed.kind = replace(disturbed.kind, files=(), exact=False, max_staleness=1, batch_steps=2)
    completions(disturbed.out, (1, A, 0), (3, B, 0))
    checks.at_the_end(disturbed, undisturbed)
    disturbed.kind = replace(disturbed.kind, batch_steps=1)
    with pytest.raises(AssertionError, match="stale"):
        checks.at_the_end(disturbed, undisturbed)


@pytest.mark.parametrize("spoil", SPOILED_INEXACT.values(), ids=SPOILED_INEXACT)
def test_what_must_hold_where_generation_is_not_exact(spoil, jobs):
    disturbed, undisturbed = jobs
    disturbed.kind = replace(disturbed.kind, files=(), exact=False)
    (disturbed.out / "hf/model.safetensors").write_bytes(b"others")
    checks.at_the_end(disturbed, undisturbed)
    spoil(disturbed)
    with pytest.raises(AssertionError):
        checks.at_the_end(disturbed, undisturbed)


# ---- the soak -------------------------------------------------------------------------------------------------------


def used(mib_a_minute: float = 0.0, files_late: int = 0, threads_late: int = 0, in_a_save: int = 0) -> list[soak.Usage]:
    """Of an hour that begins with a warm-up. in_a_save: threads more for a moment, the most at the end."""
    minutes = np.linspace(0, 60, 400)
    noise = np.random.default_rng(0).normal(0, 3, 400)
    return [
        soak.Usage(
            m,
            500 + min(m, 10) * 20 + mib_a_minute * m + n,
            20 + files_late * (m > 50),
            9 + threads_late * (m > 50) + in_a_save * (m > 50 and n > 2),
        )
        for m, n in zip(minutes.tolist(), noise.tolist())
    ]


def test_what_grows_is_told():
    assert soak.problems(used()) == soak.problems(used(0.8)) == soak.problems(used(in_a_save=3)) == []
    (told,) = soak.problems(used(1.2))
    assert told.startswith("memory grew by 1.")
    assert soak.problems(used(files_late=1)) == ["files grew from 20 to 21"]
    assert soak.problems(used(threads_late=2)) == ["threads grew from 9 to 11"]


@pytest.mark.slow
def test_a_short_soak(tmp_path, capsys):
    """It starts a run, samples it and ends it; a minute shows no growth."""
    soak.main(["--minutes", "0.1", "--kinds", "grpo", "--folder", str(tmp_path)])
    assert capsys.readouterr().out.startswith("GRPO in process, trainer 0: 0.1 minutes, ")
