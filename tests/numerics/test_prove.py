"""The prover: it proves what is so, and every planted bug makes it fail exactly where the bug shows."""

import json

import pytest
import torch
from worlds.finite_difference import slope

from isoloss.tools import prove
from isoloss.tools.parity import Measurement, Norms, Tolerance, compare
from isoloss.tools.plants import PLANTS

LAYOUTS = "dp2,ulysses2,ring2,pp2,tp2+nosp"
SMALL = ["batch.global_size=6"]


def run(tmp_path, *arguments: str) -> tuple[int, dict]:
    cache = f"data.cache_dir={tmp_path.parent}/cache"
    status = prove.main(["--layouts", LAYOUTS, "--budgets", "500,0", "--out", str(tmp_path), *arguments, *SMALL, cache])
    return status, json.loads((tmp_path / "proof.json").read_text())


def test_a_proof_on_the_shipped_data(tmp_path, capsys):
    status, proof = run(tmp_path, "--aggregations", "token-mean,prompt-mean-token-mean")
    assert status == 0 and proof["proved"]
    assert len(proof["runs"]) == 20
    assert all(r["gradient_error"] <= 1e-10 and r["loss_error"] <= 1e-12 for r in proof["runs"])
    assert (tmp_path / "proof.png").read_bytes().startswith(b"\x89PNG")
    assert "proved: 20 of 20 runs agree" in capsys.readouterr().out


def test_every_bug_on_the_list_can_be_planted():
    assert set(PLANTS) == {
        "mean-of-micro-batch-means",
        "counts-over-dp-and-sp",
        "gradients-averaged-over-dp",
        "context-factor-twice",
        "rank-local-denominators",
        "targets-shifted-after-sharding",
        "dropped-micro-batch",
        "fully-masked-sequence-counted",
        "attention-sees-its-own-shard",
    }


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_bug_fails_where_it_shows_and_only_there(tmp_path, plant):
    status, proof = run(tmp_path, "--plant", plant, "--aggregations", "token-mean,seq-mean-token-mean")
    assert status == 1 and not proof["proved"] and proof["plant"] == plant
    spoiled = [r for r in proof["runs"] if r["spoiled_by_plant"]]
    untouched = [r for r in proof["runs"] if not r["spoiled_by_plant"]]
    assert spoiled and untouched
    # The gradient alone gives every bug away: a loss check is too weak, and the canary sees only some of them.
    assert all(r["gradient_error"] > 1e-6 for r in spoiled), [r for r in spoiled if r["gradient_error"] <= 1e-6]
    assert all(not r["passed"] for r in spoiled)
    assert all(r["passed"] for r in untouched), [r["reason"] for r in untouched if not r["passed"]]


def measurement(**norms: Norms) -> Measurement:
    return Measurement(2.0, 2.0, {}, grad_norm=1.0, weight_sum=1.0, micro_batches=1, canary=None, parameters=norms)


TOLERANCE = Tolerance(loss=1e-12, gradient=1e-10)


def test_a_proof_in_which_nothing_depends_on_the_data_fails():
    dead = measurement(a=Norms(1.0, 1.0, 0.0), b=Norms(0.0, 0.0, 0.0))
    against = compare(dead, dead, TOLERANCE)
    assert not against.passed and "gradient of b is zero" in against.reason


def test_a_missing_parameter_or_a_nan_fails():
    whole = measurement(a=Norms(1.0, 1.0, 0.0), b=Norms(1.0, 1.0, 0.0))
    assert compare(whole, whole, TOLERANCE).passed
    assert "no gradient for b" in compare(measurement(a=Norms(1.0, 1.0, 0.0)), whole, TOLERANCE).reason
    poisoned = measurement(a=Norms(1.0, 1.0, 0.0), b=Norms(1.0, 1.0, float("nan")))
    against = compare(poisoned, whole, TOLERANCE)
    assert not against.passed and against.worst == "b"


def test_zero_gradients_fail_end_to_end(tmp_path, pool, monkeypatch):
    """A batch without a target has zero gradients everywhere: equal on every layout, and no proof."""
    original = prove.first_batch

    def masked(config, plant):
        samples = original(config, plant)
        for sample in samples:
            sample.mask_T.zero_()
        return samples

    monkeypatch.setattr(prove, "first_batch", masked)
    status, proof = run(tmp_path)
    assert status == 1 and all("zero: nothing is proved" in r["reason"] for r in proof["runs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "tp2+zz3"], "cannot read 'zz3'"),
        (["--layouts", "ulysses4"], "parallel.ulysses=4 does not divide the 6 attention heads"),
        (["--layouts", "tp2", "--aggregations", "median"], "loss.aggregation='median'"),
        (["--layouts", "tp2", "optim.lrr=1"], "did you mean 'optim.lr'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, capsys, tmp_path):
    assert prove.main([*arguments, "--out", str(tmp_path / "proof")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.count("\n") == 0
    assert not (tmp_path / "proof").exists()


def test_the_reference_is_the_gradient_of_the_logged_loss(pool, tmp_path):
    """What the proof compares with is itself checked: by a finite difference of the loss along the gradient."""
    claimed, measured = pool.run(1, slope, str(tmp_path))[0]
    assert measured == pytest.approx(claimed, rel=1e-6)
    assert torch.isfinite(torch.tensor(claimed)) and claimed > 0
