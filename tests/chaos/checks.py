"""What must hold of a run, whatever was done to it."""

import hashlib
import re
from pathlib import Path

from chaos.job import Job


def weights(out: Path) -> str:
    """A hash of the exported weights."""
    files = sorted((out / "hf").glob("*.safetensors"))
    assert files, f"no weights in {out}/hf"
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def so_far(job: Job, whole: Job) -> None:
    """Everything that it told is what the undisturbed run told, each step and completion once and in order. It went on
    from the newest checkpoint; at most the two steps whose saves may have been under way are lost. The disk holds no
    more than it may."""
    for file in job.kind.files:
        told, wanted = job.rows(file), whole.rows(file)
        for index, row in enumerate(told):
            assert index < len(wanted) and row == wanted[index], f"{file}, line {index + 1}: {row}"
    saved = job.saved()
    assert len(saved) <= job.keep + 1, f"{len(saved)} checkpoints"  # one that is to be deleted
    newest = job.newest_saved()
    assert job.done() - 2 <= newest <= job.done(), f"step {job.done()} was done, {newest} saved"
    if begun := re.search(r"^(resumed after step (\d+)|no checkpoint in .*: a new run)$", job.said(), re.M):
        assert int(begun[2] or 0) == job.newest, f"{begun[1]}, not after step {job.newest}"
    assert len(list(job.out.glob("checkpoints/.*"))) <= 2, "what killed saves leave is not deleted"


def at_the_end(job: Job, whole: Job) -> None:
    so_far(job, whole)
    for file in job.kind.files:
        assert job.rows(file) == whole.rows(file), file
    assert [row["step"] for row in job.rows("metrics.jsonl")] == list(range(1, job.steps + 1))
    if rollouts := job.rows("rollouts.jsonl"):
        ids = [row["id"] for row in rollouts]
        assert len(set(ids)) == len(ids), "a prompt was drawn twice"
        oldest = job.kind.max_staleness * job.kind.batch_steps
        stale = [
            row["id"]
            for row in rollouts
            if not row["step"] - 1 - oldest <= min(row["weight_versions"]) <= max(row["weight_versions"]) < row["step"]
        ]
        assert not stale, f"stale: {stale}"
        draws = sorted({int(row["id"].split("/")[1]) for row in rollouts})
        assert draws == list(range(len(draws))), "a prompt was lost"
        last = job.rows("metrics.jsonl")[-1]
        assert last["prompts_drawn"] - last["prompts_in_flight"] == len(draws), "the ledger is wrong"
    other = [row["step"] for row in job.rows("metrics.jsonl") if row.get("train_rollout_logprob_diff", 0) > 1e-4]
    assert job.kind.max_staleness or not other, f"what generated at steps {other} was not the policy"
    assert not job.kind.exact or weights(job.out) == weights(whole.out), "other weights"
    names = [path.name for path in job.out.glob("checkpoints/*")]
    whole_ones = sorted(name for name in names if name.startswith("step_"))
    assert whole_ones == [f"step_{step:08d}" for step in range(job.steps - job.keep + 1, job.steps + 1)], names
    strange = [name for name in names if not name.startswith(("step_", "damaged_step_"))]
    assert not strange and not (job.out / ".hf.partial").exists(), strange
