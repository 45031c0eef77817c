"""The prover: it proves what is so, and every planted bug makes it fail exactly where the bug shows."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from numerics.finite_difference import slope
from support.models.experts import MODELS
from support.models.families import published, write_config
from support.ranks.invariance import FOUR_LAYERS
from support.runs.runs import copy_tokenizer

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import LossConfig
from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import Layout
from isoloss.recipes.launch import ASSETS
from isoloss.tools.prove import __main__ as prove
from isoloss.tools.prove import proof
from isoloss.tools.prove.bugs import NO_BUG, PLANTED_BUGS
from isoloss.tools.prove.bugs.adapters import ADAPTERS
from isoloss.tools.prove.bugs.dense import DENSE
from isoloss.tools.prove.bugs.policy import PREFIXES
from isoloss.tools.prove.certificate import ProofRun, claims, verdict
from isoloss.tools.prove.parity import Case, Measurement, Norms, Tolerance, compare

LAYOUTS = "dp2,ulysses2,ring2,pp2,tp2+nosp"
BALANCED = ("moe.aux_loss=sequence", "moe.aux_loss_coef=0.5", "moe.z_loss_coef=0.1")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a dense model and one with experts, for rows of text."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 2048, "max_position_embeddings": 512}
    for name, of_name in (
        ("dense", published("qwen3", **FOUR_LAYERS | sizes)),
        ("experts", published("qwen3-moe", **MODELS["qwen3-moe"] | sizes)),
        ("latent", published("deepseek-v3", **sizes)),
    ):
        write_config(folder / name, of_name)
        copy_tokenizer(folder / name)
    return folder


@pytest.fixture
def run(pool, models, tmp_path, capsys):
    """run(*arguments, model) -> status, certificate, what was said."""

    def run(*arguments: str, model: str = "dense", layouts: str = LAYOUTS) -> tuple[int, dict, str]:
        of_model = [f"model.path={models}/{model}", "model.from_scratch=true", "data.max_length=512"]
        data = [f"data.train={ASSETS}/tiny/eval.jsonl", f"data.cache_dir={models}/cache", "batch.global_size=6"]
        status = prove.main(
            ["--layouts", layouts, "--out", str(tmp_path / "proof"), *of_model, *data, *arguments], pool
        )
        told = capsys.readouterr()
        file = tmp_path / "proof" / "proof.json"
        return status, json.loads(file.read_text()) if file.exists() else {}, told.out + told.err

    return run


def test_a_proof_on_the_shipped_model_and_data(pool, tmp_path, capsys):
    arguments = ["--layouts", "dp2,ulysses2", "batch.global_size=6", f"data.cache_dir={tmp_path}/cache"]
    modes = ["--aggregations", "token-mean,prompt-mean-token-mean"]
    assert prove.main([*arguments, *modes, "--out", str(tmp_path)], pool) == 0
    certificate = json.loads((tmp_path / "proof.json").read_text())
    assert certificate["proved"] and len(certificate["runs"]) == 10
    assert all(verdict.startswith("proved by") for verdict in certificate["claims"].values())
    assert set(certificate["claims"]) == {"layouts", "micro-batches", "token-mean", "prompt-mean-token-mean"}
    assert all(r["gradient_error"] <= 1e-10 and r["loss_error"] <= 1e-12 for r in certificate["runs"])
    assert (tmp_path / "proof.png").read_bytes().startswith(b"\x89PNG")
    assert "proved: 10 of 10 runs agree" in capsys.readouterr().out


def test_budgets_come_from_the_data(run):
    """One micro-batch a rank, three, and one sample each; on two dp ranks of three samples the last two are one."""
    status, certificate, told = run(layouts="1,dp2,pp2+vpp2")
    assert status == 0, told
    counts = Counter((r["layout"], r["micro_batches"]) for r in certificate["runs"])
    assert counts == dict.fromkeys(
        [("1", 1), ("1", 3), ("1", 6), ("dp2", 1), ("dp2", 3), ("pp2+vpp2", 2), ("pp2+vpp2", 4), ("pp2+vpp2", 6)], 1
    )
    assert "6 micro-batches" in told and "proved by 7 runs" in told


def test_budgets_that_give_the_same_micro_batches_run_once(run):
    """And where nothing was cut into micro-batches, nothing is proved about them."""
    status, certificate, told = run("--budgets", "8192,0", layouts="dp2")
    assert [r["micro_batches"] for r in certificate["runs"]] == [1]
    assert status == 1 and not certificate["proved"] and "NOT proved: 1 of 1 runs agree" in told
    assert certificate["claims"]["micro-batches"].startswith("not exercised: leave --budgets out")
    assert certificate["claims"]["layouts"] == "proved by 1 runs: dp2"


def test_one_rank_proves_nothing_about_layouts(run):
    status, certificate, _ = run(layouts="1")
    assert status == 1 and certificate["claims"]["layouts"].startswith("not exercised: name a layout")
    assert certificate["claims"]["token-mean"] == "proved by 2 runs"


def row(layout: str, filled: int, mode: str) -> ProofRun:
    whole = measurement(a=Norms(1.0, 1.0, 0.0))
    return ProofRun(
        Layout.parse(layout), Case(0, LossConfig(mode)), whole, compare(whole, whole, TOLERANCE), filled, False
    )


def test_an_aggregation_is_exercised_where_the_step_is_cut():
    sample = Sample(torch.arange(4), torch.arange(4) > 0)
    twice, once = [sample, sample], [sample, dataclasses.replace(sample, group=1)]
    uncut, cut = row("1", 1, "prompt-mean-token-mean"), row("1", 2, "prompt-mean-token-mean")
    assert claims([uncut], twice)["prompt-mean-token-mean"] == []
    assert claims([uncut, cut], twice)["prompt-mean-token-mean"] == [cut]
    assert claims([uncut, cut], once)["prompt-mean-token-mean"] == []  # a prompt of one sample is a sequence
    assert verdict("token-mean", []).startswith("not exercised")


# Gradients are right, and their norm is not: clipping is.
OF_THE_NORM = ("replicas-counted-by-every-tp-rank", "shards-of-the-first-tp-rank-alone", "adapter-norm-of-copies")
# The error that shows such a bug, in place of that of the gradient.
SHOWN_IN = {**dict.fromkeys(OF_THE_NORM, "norm_error"), "adapter-not-off": "base_error"}
OF_GRADIENTS_ALONE = ("adapter-parts-not-summed", "expert-adapter-over-dp", "frozen-input", "adapter-norm-of-copies")
# The same on every layout: only the model with merged weights gives them away.
ON_EVERY_LAYOUT = ("adapter-rows-not-interleaved", "shared-a", "adapter-scale", "adapter-not-off")


def test_every_bug_on_the_list_can_be_planted():
    assert {bug.name for bug in DENSE} == {
        "mean-of-micro-batch-means",
        "counts-over-dp-and-sp",
        "gradients-averaged-over-dp",
        "context-factor-twice",
        "rank-local-denominators",
        "targets-shifted-after-sharding",
        "dropped-micro-batch",
        "fully-masked-sequence-counted",
        "attention-sees-its-own-shard",
        *OF_THE_NORM[:2],
    }


TWO_MODES = ("--budgets", "500,0", "--aggregations", "token-mean,seq-mean-token-mean")
ADAPTED = ("--budgets", "0", "lora.rank=2", "lora.alpha=6")
KL = ("--loss", "clip", "algorithm.kl_coef=0.2", "algorithm.kl_aggregation=seq-mean-token-mean")
SHOWN_BY = {
    **dict.fromkeys([bug.name for bug in DENSE], ("dense", LAYOUTS, TWO_MODES)),
    **dict.fromkeys(OF_THE_NORM, ("dense", "dp2,tp2", ("--budgets", "0"))),
    **dict.fromkeys([bug.name for bug in ADAPTERS], ("dense", "dp2,tp2", ADAPTED)),
    **dict.fromkeys(ON_EVERY_LAYOUT, ("dense", "dp2", ADAPTED)),
    "adapter-parts-not-summed": ("dense", "dp2,tp2+nosp", ADAPTED),
    "adapter-of-latents-gathered": ("latent", "pp2,tp2", ADAPTED),
    "expert-adapter-over-dp": ("experts", "dp2,ep2+dp2", ADAPTED),
    "frozen-input": ("dense", "dp2,pp2", (*ADAPTED, "memory.recompute=full")),
    "sequence-sum-of-its-own-shard": ("dense", "dp2,ulysses2", ("--loss", "gspo")),
    "sequence-gradient-of-its-own-shard": ("dense", "dp2,ulysses2", ("--loss", "gspo")),
    "second-term-by-micro-batch-means": ("dense", "dp2,ulysses2", KL),
    "expert-gradients-averaged": ("experts", "dp2,pp2", BALANCED),
    "router-losses-by-micro-batch": ("experts", "1,dp2", BALANCED),
    "balance-of-its-own-shard": ("experts", "dp2,tp2", BALANCED),
    "padding-counted": ("experts", "pp2,ulysses2", BALANCED),
    **dict.fromkeys(
        [bug.name for bug in PREFIXES if bug.name != "shared-tokens-routed-once"],
        ("dense", "dp2,tp2+ring2", ("--loss", "clip", "--budgets", "2,600,0")),
    ),
    "shared-tokens-routed-once": ("experts", "1,dp2", ("--loss", "clip", "--budgets", "2,0", *BALANCED)),
}


# The weights that the loss head consumed add up to something else, in each spoiled run; or to the right sum, put on the
# wrong tokens, or lost behind the loss.
SEEN_BY_THE_CANARY = {
    "counts-over-dp-and-sp", "context-factor-twice", "rank-local-denominators", "dropped-micro-batch",
}  # fmt: skip
HIDDEN_FROM_THE_CANARY = {
    "gradients-averaged-over-dp", "targets-shifted-after-sharding", "attention-sees-its-own-shard",
    "expert-gradients-averaged", "sequence-gradient-of-its-own-shard", *OF_THE_NORM,
}  # fmt: skip


def test_every_bug_can_be_shown_but_one_of_several_steps():
    assert PLANTED_BUGS.keys() - SHOWN_BY.keys() == {"loads-of-its-own-rank"}


@pytest.mark.parametrize("bug", SHOWN_BY)
def test_a_planted_bug_fails_where_it_shows_and_only_there(run, bug):
    model, layouts, arguments = SHOWN_BY[bug]
    status, certificate, told = run("--plant", bug, *arguments, model=model, layouts=layouts)
    caught = len([r for r in certificate["runs"] if r["must_fail"]])
    assert f"planted bug {bug}: caught in {caught} of {caught} runs that must fail" in told.splitlines()[-1], told
    assert status == 1 and not certificate["proved"] and certificate["planted_bug"] == bug
    spoiled = [r for r in certificate["runs"] if r["must_fail"]]
    untouched = [r for r in certificate["runs"] if not r["must_fail"]]
    assert spoiled and bool(untouched) == (bug not in ON_EVERY_LAYOUT)
    # The gradient alone gives every other bug away: a loss check is too weak, and the canary sees some of them only.
    warned = ["canary: " in r["reason"] for r in spoiled]
    assert all(warned) if bug in SEEN_BY_THE_CANARY else not (any(warned) and bug in HIDDEN_FROM_THE_CANARY), warned
    error = SHOWN_IN.get(bug, "gradient_error")
    assert all(r[error] > 1e-6 for r in spoiled), [r for r in spoiled if r[error] <= 1e-6]
    assert error == "gradient_error" or all(r["gradient_error"] <= 1e-10 for r in spoiled)
    if bug in OF_GRADIENTS_ALONE:
        assert all(r["loss_error"] <= 1e-12 for r in spoiled)
    assert all(not r["passed"] for r in spoiled)
    assert all(r["passed"] for r in untouched), [r["reason"] for r in untouched if not r["passed"]]


ADAPTERS_OF = [
    ("dense", "tp2+nosp,pp2,ulysses2", ("lora.targets=[attention,down_proj]", "lora.scaling=sqrt-rank")),
    ("experts", "etp2+dp2,tp2,ep2+dp2", ("lora.expert_rank=1", *BALANCED)),
    ("latent", "tp2,pp2", ()),
]


@pytest.mark.parametrize(("model", "layouts", "keys"), ADAPTERS_OF, ids=[model for model, *_ in ADAPTERS_OF])
def test_a_proof_of_an_adapter(run, model, layouts, keys):
    """Against a model with merged weights that is trained as a whole: every factor of every adapted matrix."""
    status, certificate, told = run("lora.rank=3", *keys, "--budgets", "500,0", model=model, layouts=layouts)
    assert status == 0, told
    assert all(r["base_error"] <= 1e-12 for r in certificate["runs"]) and "  base " in told
    assert all(r["worst"].endswith((".lora_A", ".lora_B")) for r in certificate["runs"])
    assert "one rank with merged weights" in told


def test_a_proof_of_an_adapter_in_fp32_and_of_a_policy_loss(run):
    status, certificate, told = run("lora.rank=2", "--precision", "fp32", "--loss", "clip", layouts="dp2,tp2")
    assert status == 0, told
    assert all(r["base_error"] <= 1e-6 for r in certificate["runs"])


@pytest.mark.parametrize("bug", ["adapter-parts-not-summed", "adapter-after-the-collective", "adapter-norm-of-copies"])
def test_bugs_of_adapters_of_experts_show_where_etp_divides_those(run, bug):
    status, certificate, told = run(
        "--plant", bug, *ADAPTED, "lora.targets=[experts]", model="experts", layouts="tp2,etp2+dp2"
    )
    assert status == 1 and "caught in 1 of 1 runs that must fail; 1 of 1 others pass" in told, told
    assert [r["layout"] for r in certificate["runs"] if r["must_fail"]] == ["etp2+dp2"]


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


def test_the_gradient_norm_counts():
    """A norm that forgets a rank's parameters clips wrongly, with every gradient right."""
    whole = measurement(a=Norms(1.0, 1.0, 0.0))
    against = compare(dataclasses.replace(whole, grad_norm=1 + 1e-9), whole, TOLERANCE)
    assert not against.passed and against.reason == "gradient norm off by 1.0e-09"
    assert compare(dataclasses.replace(whole, grad_norm=1 + 1e-11), whole, TOLERANCE).passed
    assert not compare(dataclasses.replace(whole, grad_norm=float("nan")), whole, TOLERANCE).passed


@pytest.mark.parametrize(
    ("loss", "keys"),
    [
        ("clip", ("algorithm.kl_coef=0.2", "algorithm.entropy_coef=0.1", "algorithm.importance=sequence")),
        ("gspo", ()),
        ("cispo", ("algorithm.clip_low=1", "algorithm.importance=token")),
        ("reinforce", ("algorithm.kl_coef=0.1", "algorithm.kl_aggregation=prompt-mean-token-mean")),
    ],
)
def test_a_proof_of_a_policy_loss(run, loss, keys):
    status, certificate, told = run("--loss", loss, *keys, layouts="dp2,ulysses2")
    assert status == 0 and certificate["loss"] == loss, told
    assert {r["aggregation"] for r in certificate["runs"]} == {
        "seq-mean-token-mean" if loss == "gspo" else "token-mean"
    }


def test_what_is_made_up_reaches_every_branch(pool, models):
    """Ratios beyond the clipping bounds and within, advantages of both signs: they do not agree on nothing."""
    keys = [f"model.path={models}/dense", "model.from_scratch=true", "data.max_length=512", "batch.global_size=6"]
    data = [f"data.train={ASSETS}/tiny/eval.jsonl", f"data.cache_dir={models}/cache"]
    config = prove.configuration("clip", [*keys, *data])
    assert isinstance(config, RLConfig)
    samples = proof.with_rollout(config, proof.first_batch(config, NO_BUG), "fp64", pool)
    advantages = torch.cat([s.fields["advantages"] for s in samples])
    assert (advantages > 0).any() and (advantages < 0).any()
    assert all((values[~s.mask_T] == 0).all() for s in samples for values in s.fields.values())
    rows = proof.prove(config, samples, {Layout(): [Case(0, config.loss, config)]}, "fp64", pool=pool)
    details = rows[0].measured.details
    assert 0.05 < details["clip_fraction"] < 0.5
    assert details["kl"] > 1e-3 and 0.05 < details["train_rollout_logprob_diff"] < 0.2


@pytest.mark.parametrize(
    ("bug", "arguments", "needs"),
    [
        ("expert-gradients-averaged", (), "it needs a model with experts"),
        ("sequence-sum-of-its-own-shard", ("--loss", "cispo"), "--loss gspo"),
        ("second-term-by-micro-batch-means", (), "it needs a KL or entropy term with an aggregation of its own"),
        ("gradients-averaged-over-dp", (), "it needs a layout with dp"),
        ("loads-of-its-own-rank", (), "selection biases after several optimizer steps"),
    ],
)
def test_a_planted_bug_that_cannot_show_is_refused(run, bug, arguments, needs):
    layout = "dp2" if bug.startswith("sequence") else "ulysses2"
    status, certificate, told = run("--plant", bug, *arguments, layouts=layout)
    assert status == 2 and not certificate
    assert told.count("\n") == 1 and f"--plant {bug} shows in none of these runs" in told and needs in told


def test_a_batch_of_one_row_is_refused(run):
    status, certificate, told = run("batch.global_size=1")
    assert status == 2 and not certificate and "needs at least two rows in the batch" in told and told.count("\n") == 1


def test_zero_gradients_fail_end_to_end(run, monkeypatch):
    """A batch without a target has zero gradients everywhere: equal on every layout, and no proof."""
    original = proof.first_batch

    def masked(config, bug):
        samples = original(config, bug)
        for sample in samples:
            sample.mask_T.zero_()
        return samples

    monkeypatch.setattr(proof, "first_batch", masked)
    status, certificate, _ = run(layouts="dp2")
    assert status == 1 and all("zero: nothing is proved" in r["reason"] for r in certificate["runs"])


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
