"""Losses of policy and critic against the papers' formulas (tests/oracles/rl/formulas.py).

Shape suffixes: N labeled tokens of the batch, C of one completion, V a vocabulary.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
from oracles.rl import formulas
from support.ranks.normalizer import GROUPS, MASKS, NORM_LENGTH, NUM_GROUPS, norm_length, reference_loss

from isoloss.engine.config.schema import BatchConfig, LossConfig, ModelConfig
from isoloss.engine.rl import losses
from isoloss.engine.rl.algorithms import KL_ESTIMATORS, LOSSES, imported
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.engine.step import forward_backward as step
from isoloss.engine.step.losses import Loss, TokenInputs
from isoloss.parallel.aggregation import MODES
from isoloss.parallel.normalizer import Ids, count_tokens, token_weights

LENGTHS = (5, 1, 9, 3, 2)


@dataclass(frozen=True)
class Batch:
    """Log-probabilities and the like of completions of uneven length, [N] fp64. document_N: the completion of each."""

    logprobs: np.ndarray
    entropy: np.ndarray
    document_N: np.ndarray
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def random(cls, seed, lengths=LENGTHS, spread=0.3):
        random = np.random.default_rng(seed)
        count = sum(lengths)
        logprobs = -random.exponential(size=count)
        near = lambda: logprobs + spread * random.normal(size=count)
        fields = {name: near() for name in ("train_logprobs", "rollout_logprobs", "ref_logprobs")}
        return cls(
            logprobs,
            random.exponential(size=count),
            np.repeat(np.arange(len(lengths)), lengths),
            fields | {"advantages": random.normal(size=count)},
        )

    def inputs(self, context, dtype=torch.float64):
        """As a loss gets them; a padding document without a label stands at the end."""
        logprobs_N = torch.tensor(self.logprobs, dtype=dtype, requires_grad=True)
        entropy_N = torch.tensor(self.entropy, dtype=dtype, requires_grad=True)
        fields = {name: torch.tensor(values, dtype=dtype) for name, values in self.fields.items()}
        document_N = torch.tensor(self.document_N)
        return TokenInputs(logprobs_N, entropy_N, None, fields, document_N, int(document_N.max()) + 2, context)

    def of_completions(self, formula):
        """formula(logprobs, its further fields) of each completion, [N]."""
        parts = []
        for document in range(self.document_N.max() + 1):
            at = self.document_N == document
            parts.append(formula(self.logprobs[at], {name: values[at] for name, values in self.fields.items()}))
        return np.concatenate(parts)


def policy_terms(batch, algorithm, at=None):
    """Each token's policy term, [N]. at: the batch whose log-probabilities stand wherever a paper writes sg()."""
    constant = (at or batch).logprobs
    low, high = algorithm.clip_low, algorithm.clip_high

    def formula(logp_C, fields):
        advantages_C, rollout_C = fields["advantages"], fields["rollout_logprobs"]
        constant_C, train_C = fields["constant"], fields.get("train_logprobs", fields["constant"])
        old_C = rollout_C if algorithm.old_logprobs == "rollout" else train_C
        terms_C = {
            "clip": lambda: formulas.clip(logp_C, old_C, advantages_C, low, high, algorithm.dual_clip),
            "gspo": lambda: formulas.gspo(logp_C, old_C, advantages_C, low, high),
            "cispo": lambda: formulas.cispo(logp_C, old_C, advantages_C, low, high, constant_C),
            "reinforce": lambda: formulas.reinforce(logp_C, advantages_C),
        }[algorithm.loss]()
        if algorithm.importance == "none":
            return terms_C
        trainer_C = constant_C if algorithm.old_logprobs == "rollout" else train_C
        return terms_C * formulas.importance(trainer_C, rollout_C, algorithm.importance, algorithm.importance_cap)

    return replace(batch, fields=batch.fields | {"constant": constant}).of_completions(formula)


def check_gradient(per_token, inputs, terms_of, leaf, values, rel=1e-6):
    """d(sum of c_N x term_N)/d leaf against central differences of the independent formula; returns the gradient."""
    cotangent_N = np.random.default_rng(99).uniform(0.5, 2, size=len(values))
    got = per_token(inputs)
    (gradient_N,) = torch.autograd.grad(got, leaf, torch.tensor(cotangent_N, dtype=got.dtype))
    wanted_N, step = [], 1e-6
    for index in range(len(values)):
        by = step * (np.arange(len(values)) == index)
        wanted_N.append((cotangent_N * (terms_of(values + by) - terms_of(values - by))).sum() / (2 * step))
    assert gradient_N.numpy() == pytest.approx(np.array(wanted_N), rel=rel, abs=1e-8)
    return gradient_N


# -------------------------------------------------------------------------------------------------------------- policy

POLICIES = [
    AlgorithmConfig(loss="clip"),
    AlgorithmConfig(loss="clip", clip_low=0.1, clip_high=0.4),
    AlgorithmConfig(loss="clip", dual_clip=1.3),
    AlgorithmConfig(loss="gspo", clip_low=0.05, clip_high=0.1),
    AlgorithmConfig(loss="cispo", clip_low=1.0, clip_high=0.28),
    AlgorithmConfig(loss="cispo", clip_low=0.3, clip_high=0.1),
    AlgorithmConfig(loss="reinforce"),
]
CORRECTIONS = [
    {},
    {"old_logprobs": "rollout"},
    {"importance": "token", "importance_cap": 1.1},
    {"importance": "sequence", "importance_cap": 1.2},
    {"old_logprobs": "rollout", "importance": "token", "importance_cap": 1.1},
    {"old_logprobs": "rollout", "importance": "sequence", "importance_cap": 1.2},
]
CASES = [
    replace(policy, **correction)
    for policy, correction in itertools.product(POLICIES, CORRECTIONS)
    if policy.loss == "reinforce" or len(correction) < 3  # the configuration refuses to correct twice
]


def name_of(algorithm):
    default = AlgorithmConfig()
    return "-".join(
        f"{name}={value}" for name, value in vars(algorithm).items() if value != getattr(default, name)
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", CASES, ids=name_of)
def test_policy_terms_and_their_gradients(algorithm, one_rank):
    per_token = partial(imported(LOSSES[algorithm.loss].function, "loss"), algorithm=algorithm)
    for seed in range(4):
        batch = Batch.random(seed)
        if seed == 3:  # the first optimizer step after generating
            batch = replace(batch, fields={k: v for k, v in batch.fields.items() if k != "train_logprobs"})
        inputs = batch.inputs(one_rank)
        terms_N = policy_terms(batch, algorithm)
        assert per_token(inputs).detach().numpy() == pytest.approx(terms_N, rel=1e-12, abs=1e-14)
        terms_of = lambda logprobs, batch=batch: policy_terms(replace(batch, logprobs=logprobs), algorithm, at=batch)
        check_gradient(per_token, inputs, terms_of, inputs.logprobs_N, batch.logprobs)


def test_the_cases_reach_every_branch():
    """Ratios below, inside and above the range, for advantages of both signs: the comparison above means something."""
    batch, old = Batch.random(0), Batch.random(0).fields["train_logprobs"]
    ratio_N = np.exp(batch.logprobs - old)
    advantages_N = batch.fields["advantages"]
    for sign in (-1, 1):
        of_sign = ratio_N[np.sign(advantages_N) == sign]
        assert (of_sign < 0.9).any() and (of_sign > 1.1).any() and (abs(of_sign - 1) < 0.1).any()
    assert ((advantages_N < 0) & (ratio_N > 1.3)).any()  # dual clipping


@pytest.mark.parametrize("algorithm", POLICIES, ids=name_of)
def test_the_first_on_policy_step_is_reinforce(algorithm, one_rank):
    """Ratio exactly 1 (in fp32 too), so nothing is clipped and the gradient is -advantage of the token."""
    batch = Batch.random(0)
    advantages_N = np.repeat([1.5, -1.0, 0.0, 2.0, -0.5], LENGTHS)  # one of each completion, as rewards give
    batch = replace(batch, fields={"advantages": advantages_N, "rollout_logprobs": batch.fields["rollout_logprobs"]})
    for dtype in (torch.float32, torch.float64):
        inputs = batch.inputs(one_rank, dtype)
        terms_N = imported(LOSSES[algorithm.loss].function, "loss")(inputs, algorithm)
        if algorithm.loss in ("clip", "gspo"):
            assert torch.equal(terms_N.detach(), -inputs.fields["advantages"])
        (gradient_N,) = torch.autograd.grad(terms_N.sum(), inputs.logprobs_N)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        assert gradient_N.tolist() == pytest.approx((-advantages_N).tolist(), abs=tolerance)
        assert not losses.mean_metrics(algorithm)["clip_fraction"](inputs).any()
        assert not losses.mean_metrics(algorithm)["kl"](inputs).any()


def test_the_gradient_of_gspo_is_the_papers(one_rank):
    """Equation 10: s_i A_i / |y_i| of every token's log-probability, under the weights of seq-mean-token-mean."""
    algorithm = AlgorithmConfig(loss="gspo", clip_low=0.05, clip_high=0.1)
    clipped = set()
    for seed in range(8):
        batch = Batch.random(seed)
        of_completion = np.random.default_rng(seed).normal(size=len(LENGTHS))
        batch = replace(batch, fields=batch.fields | {"advantages": np.repeat(of_completion, LENGTHS)})
        wanted_N = batch.of_completions(
            lambda logp_C, fields: (
                formulas.gspo_gradient(logp_C, fields["train_logprobs"], fields["advantages"], 0.05, 0.1) / len(logp_C)
            )
        ) / len(LENGTHS)
        clipped |= set((wanted_N == 0).tolist())
        inputs = batch.inputs(one_rank)
        weights_N = torch.tensor(np.repeat([1 / (len(LENGTHS) * n) for n in LENGTHS], LENGTHS))
        (gradient_N,) = torch.autograd.grad(losses.gspo_loss(inputs, algorithm), inputs.logprobs_N, weights_N)
        assert gradient_N.numpy() == pytest.approx(wanted_N, rel=1e-12, abs=1e-16)
    assert clipped == {False, True}


@pytest.mark.parametrize("importance", ["none", "token", "sequence"])
@pytest.mark.parametrize("policy", POLICIES, ids=name_of)
def test_huge_log_ratios_stay_finite(policy, importance, one_rank):
    algorithm = replace(policy, importance=importance)
    far = np.array([1e4, -1e4, 90.0, -90.0, 21.0, -21.0])
    logprobs_N = np.repeat(np.minimum(-0.1, -abs(far)), 3)
    other_N = logprobs_N + np.repeat(far, 3)
    fields = dict.fromkeys(("train_logprobs", "rollout_logprobs", "ref_logprobs"), other_N)
    fields |= {"advantages": np.tile([0.0, 1.0, -1.0], 6)}
    batch = Batch(logprobs_N, np.ones(18), np.arange(18), fields)
    for moved in (fields, fields | {"rollout_logprobs": logprobs_N}, fields | {"train_logprobs": logprobs_N}):
        inputs = replace(batch, fields=moved).inputs(one_rank, torch.float32)
        terms_N = imported(LOSSES[algorithm.loss].function, "loss")(inputs, algorithm)
        (gradient_N,) = torch.autograd.grad(terms_N.sum(), inputs.logprobs_N)
        assert terms_N.isfinite().all() and gradient_N.isfinite().all()
        assert not terms_N[::3].any() and not gradient_N[::3].any()  # advantage 0
        for of_token in losses.mean_metrics(algorithm).values():
            assert of_token(inputs).isfinite().all()


# --------------------------------------------------------------------------------------------------------- KL, entropy


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_terms_and_their_gradients(estimator, one_rank):
    per_token = lambda inputs: losses.kl_from_reference(inputs, imported(KL_ESTIMATORS[estimator], "estimator"))
    for seed in range(3):
        batch = Batch.random(seed)
        inputs = batch.inputs(one_rank)
        terms_of = lambda logprobs, batch=batch: formulas.kl(logprobs, batch.fields["ref_logprobs"], estimator)
        assert per_token(inputs).detach().numpy() == pytest.approx(terms_of(batch.logprobs), rel=1e-11, abs=1e-15)
        check_gradient(per_token, inputs, terms_of, inputs.logprobs_N, batch.logprobs)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", [-60, 60], [1, 1]), ("k2", [1800, 1800], [-60, 60]), ("k3", [10, 10], [0, 0])],
)
def test_kl_far_from_the_reference(estimator, value, gradient, one_rank):
    """60 nats either way: k3 ends at its bound, the others still pull back."""
    logprobs_N = np.array([-70.0, -5.0])
    batch = Batch(logprobs_N, np.ones(2), np.arange(2), {"ref_logprobs": logprobs_N + [60, -60]})
    inputs = batch.inputs(one_rank)
    terms_N = losses.kl_from_reference(inputs, imported(KL_ESTIMATORS[estimator], "estimator"))
    (gradient_N,) = torch.autograd.grad(terms_N.sum(), inputs.logprobs_N)
    assert terms_N.tolist() == pytest.approx(value, rel=1e-6) and gradient_N.tolist() == pytest.approx(gradient)


def test_k3_is_bounded_as_verl_does(one_rank):
    """low_var_kl of verl.trainer.ppo.core_algos: both clamps, written here in numpy; no gradient is above 12.6."""
    difference_N = np.linspace(-25, 25, 1001)
    clipped_N = np.clip(difference_N, -20, 20)
    logprobs_N = np.full(1001, -26.0)
    batch = Batch(logprobs_N, np.ones(1001), np.arange(1001), {"ref_logprobs": logprobs_N + difference_N})
    inputs = batch.inputs(one_rank)
    terms_N = losses.kl_from_reference(inputs, losses.bounded_k3)
    (gradient_N,) = torch.autograd.grad(terms_N.sum(), inputs.logprobs_N)
    assert terms_N.tolist() == pytest.approx(np.clip(np.exp(clipped_N) - clipped_N - 1, -10, 10).tolist(), rel=1e-12)
    assert 12 < gradient_N.abs().max() < 12.7


def test_kl_in_expectation(one_rank):
    """Over a whole vocabulary: k1 and k3 have the value of KL(policy || reference); in the loss k2 has its gradient, k1
    none, and k3 the gradient of KL(reference || policy)."""
    random = torch.Generator().manual_seed(0)
    logits_V = torch.randn(6, generator=random, dtype=torch.float64, requires_grad=True)
    reference_V = torch.randn(6, generator=random, dtype=torch.float64).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    forward = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    backward = (reference_V.exp() * (reference_V - logprobs_V)).sum()
    gradient_of = lambda value: torch.autograd.grad(value, logits_V, retain_graph=True)[0]
    document_V = torch.arange(6)
    inputs = TokenInputs(logprobs_V, None, None, {"ref_logprobs": reference_V}, document_V, 6, one_rank)
    sampled = {
        name: (logprobs_V.exp().detach() * losses.kl_from_reference(inputs, estimator)).sum()
        for name, estimator in ((name, imported(of, name)) for name, of in KL_ESTIMATORS.items())
    }
    assert float(sampled["k1"].detach()) == pytest.approx(float(forward.detach()), rel=1e-13)
    assert float(sampled["k3"].detach()) == pytest.approx(float(forward.detach()), rel=1e-13)
    for name, wanted_V in [
        ("k1", torch.zeros(6)),
        ("k2", gradient_of(forward)),
        ("k3", gradient_of(backward)),
    ]:
        assert gradient_of(sampled[name]).tolist() == pytest.approx(wanted_V.tolist(), abs=1e-14), name


# -------------------------------------------------------------------------------------------------------------- critic


@pytest.mark.parametrize("value_clip", [None, 0.2, 1.0])
def test_value_terms_and_their_gradients(value_clip, one_rank):
    (term,) = losses.value_loss(AlgorithmConfig(value_clip=value_clip), LossConfig("seq-mean-token-mean")).terms
    assert (term.name, term.coefficient, term.aggregation.mode) == ("value_loss", 1.0, "seq-mean-token-mean")
    clip = np.inf if value_clip is None else value_clip
    for seed in range(4):
        random = np.random.default_rng(seed)
        values_N, old_N, returns_N = random.normal(size=(3, 30))
        leaf_N = torch.tensor(values_N, requires_grad=True)
        fields = {"returns": torch.tensor(returns_N), "old_values": torch.tensor(old_N)}
        inputs = TokenInputs(torch.zeros(0), None, leaf_N, fields, torch.zeros(30, dtype=torch.int64), 1, one_rank)
        terms_of = lambda values, old_N=old_N, returns_N=returns_N: formulas.value(values, old_N, returns_N, clip)
        assert term.per_token(inputs).detach().numpy() == pytest.approx(terms_of(values_N), rel=1e-13)
        check_gradient(term.per_token, inputs, terms_of, leaf_N, values_N)


# ------------------------------------------------------------------------------------------------------------- metrics


def clipping_changes(algorithm, logp_C, old_C, advantages_C):
    """Tokens whose objective (of cispo: weight) is another with the clipping range than without it, 0 or 1."""
    if algorithm.loss == "reinforce":
        return np.zeros(len(logp_C))

    def terms_C(low, high):
        if algorithm.loss == "cispo":
            ones_C = np.ones(len(logp_C))
            return formulas.cispo(ones_C, old_C, ones_C, low, high, constant_C=logp_C)
        formula = formulas.gspo if algorithm.loss == "gspo" else formulas.clip
        return formula(logp_C, old_C, advantages_C, low, high)

    return (abs(terms_C(algorithm.clip_low, algorithm.clip_high) - terms_C(1e9, 1e9)) > 1e-12).astype(float)


@pytest.mark.parametrize("algorithm", CASES, ids=name_of)
def test_observed(algorithm, one_rank):
    old = "rollout_logprobs" if algorithm.old_logprobs == "rollout" else "train_logprobs"
    clip_fraction = lambda logp_C, fields: clipping_changes(algorithm, logp_C, fields[old], fields["advantages"])
    for seed in range(3):
        batch = Batch.random(seed)
        fields = batch.fields
        inputs = batch.inputs(one_rank)
        got = {name: of_token(inputs).detach().tolist() for name, of_token in losses.mean_metrics(algorithm).items()}
        difference_N = abs(fields["train_logprobs"] - fields["rollout_logprobs"])
        assert got == {
            "clip_fraction": batch.of_completions(clip_fraction).tolist(),
            "kl": pytest.approx(formulas.kl(batch.logprobs, fields["ref_logprobs"], "k3").tolist()),
            "entropy": batch.entropy.tolist(),
            "train_rollout_logprob_diff": pytest.approx(difference_N.tolist()),
            "train_rollout_kl": pytest.approx(
                formulas.kl(fields["rollout_logprobs"], fields["train_logprobs"], "k3").tolist()
            ),
            "train_rollout_outliers": (difference_N > 0.5).astype(float).tolist(),
        }
        assert 0 < (difference_N > 0.5).sum() < len(difference_N)
        without = replace(batch, fields={k: v for k, v in fields.items() if k != "ref_logprobs"})
        # Samples come from the old policy: k3 with the present one as its reference.
        wanted_N = formulas.kl(fields[old], batch.logprobs, "k3")
        got_N = losses.mean_metrics(algorithm)["kl"](without.inputs(one_rank)).detach()
        assert got_N.tolist() == pytest.approx(wanted_N.tolist())


def test_the_tail_of_trainer_against_rollout(one_rank):
    """The largest difference and numpy's correlation of the probabilities, from sums over parts of the tokens."""
    batch = Batch.random(5)
    loss = losses.policy_loss(config_of("token-mean", AlgorithmConfig()))
    inputs = batch.inputs(one_rank)
    (of_token,), (pair,) = loss.max_metrics.values(), loss.correlation_metrics.values()
    train_N, rollout_N = batch.fields["train_logprobs"], batch.fields["rollout_logprobs"]
    assert float(step.largest_of(of_token(inputs))) == pytest.approx(abs(train_N - rollout_N).max(), rel=1e-14)
    parts = [torch.stack(step.moments_of(*(of[at] for of in pair(inputs)))) for at in (slice(0, 7), slice(7, 20))]
    correlation = step.correlation(sum(parts).tolist(), len(train_N))
    assert correlation == pytest.approx(np.corrcoef(np.exp(train_N), np.exp(rollout_N))[0, 1], rel=1e-12)
    assert {*loss.max_metrics, *loss.correlation_metrics} == {
        "train_rollout_logprob_diff_max",
        "train_rollout_correlation",
    }
    alike = torch.stack(step.moments_of(torch.full((9,), 0.3), torch.rand(9)))
    assert step.correlation(alike.tolist(), 9) == 1
    nothing = torch.zeros(0)
    assert float(step.largest_of(nothing)) == 0
    assert step.correlation(torch.stack(step.moments_of(nothing, nothing)).tolist(), 0) == 1


def test_observed_without_logprobs_of_the_trainer(one_rank):
    """Then the present ones are those of the weights that generated."""
    batch = Batch.random(0)
    batch = replace(batch, fields={k: batch.fields[k] for k in ("rollout_logprobs", "advantages")})
    got_N = losses.mean_metrics(AlgorithmConfig())["train_rollout_logprob_diff"](batch.inputs(one_rank))
    assert got_N.tolist() == pytest.approx(abs(batch.logprobs - batch.fields["rollout_logprobs"]).tolist())
    assert not got_N.requires_grad


# --------------------------------------------------------------------------------------------------------- aggregation


def config_of(mode, algorithm, count_fully_masked=False):
    return RLConfig(
        ModelConfig("somewhere"),
        batch=BatchConfig(global_size=8),
        loss=LossConfig(mode, norm_length(mode), count_fully_masked),
        rollout=RolloutConfig(max_new_tokens=NORM_LENGTH, temperature=0.7),
        algorithm=algorithm,
    )


def loss_of(loss: Loss, inputs, group):
    """As the engine adds it up: every term with the weights of its own aggregation."""
    counts = count_tokens(MASKS, group, prompts=Ids("group", GROUPS, NUM_GROUPS))
    weights = {a: torch.cat(token_weights(MASKS, counts, a)[0])[torch.cat(MASKS) == 1] for a in loss.aggregations}
    terms = [term.coefficient * (weights[term.aggregation] * term.per_token(inputs)).sum() for term in loss.terms]
    return sum(terms)


@pytest.mark.parametrize("count_fully_masked", [False, True])
@pytest.mark.parametrize("kl_mode", [None, *MODES])
@pytest.mark.parametrize("mode", MODES)
def test_the_whole_loss_is_a_mean_of_means_of_every_term(mode, kl_mode, count_fully_masked, one_rank):
    masks = [mask.numpy() for mask in MASKS]
    lengths = [int(mask.sum()) for mask in masks]
    entropy_mode = MODES[MODES.index(kl_mode) - 1] if kl_mode else None
    for policy in POLICIES:
        if policy.loss == "gspo" and mode != "seq-mean-token-mean":
            continue  # refused
        algorithm = replace(
            policy,
            kl_coef=0.3,
            kl_estimator="k2",
            kl_aggregation=kl_mode,
            entropy_coef=0.1,
            entropy_aggregation=entropy_mode,
        )
        loss = losses.policy_loss(config_of(mode, algorithm, count_fully_masked))
        assert loss.needs_entropy and loss.temperature == 0.7
        batch = Batch.random(1, [n for n in lengths if n])
        inputs = replace(batch, document_N=np.repeat(np.arange(len(lengths)), lengths)).inputs(one_rank)

        def mean(aggregation, terms_N):
            at = [np.flatnonzero(mask) for mask in masks]
            parts = np.split(terms_N, np.cumsum(lengths)[:-1])
            placed = [np.zeros(len(mask)) for mask in masks]
            for of_sample, index, part in zip(placed, at, parts):
                of_sample[index] = part
            return reference_loss(aggregation, placed, masks, GROUPS, NUM_GROUPS, count_fully_masked)

        wanted = (
            mean(mode, policy_terms(batch, algorithm))
            + 0.3 * mean(kl_mode or mode, formulas.kl(batch.logprobs, batch.fields["ref_logprobs"], "k2"))
            - 0.1 * mean(entropy_mode or mode, batch.entropy)
        )
        assert float(loss_of(loss, inputs, one_rank).detach()) == pytest.approx(wanted, rel=1e-12)


def test_the_gradient_of_the_whole_loss(one_rank):
    """With entropy: -coefficient x weight; with a masked token: none, for it is not among the inputs."""
    algorithm = AlgorithmConfig(entropy_coef=0.25, kl_coef=0.5, kl_estimator="k1")
    loss = losses.policy_loss(config_of("token-mean", algorithm))
    lengths = [int(mask.sum()) for mask in MASKS]
    batch = replace(Batch.random(2, lengths), document_N=np.repeat(np.arange(len(lengths)), lengths))
    inputs = batch.inputs(one_rank)
    of_logprobs_N, of_entropy_N = torch.autograd.grad(
        loss_of(loss, inputs, one_rank), [inputs.logprobs_N, inputs.entropy_N]
    )
    assert of_entropy_N.tolist() == pytest.approx([-0.25 / 15] * 15, rel=1e-13)
    only_policy = losses.policy_loss(config_of("token-mean", AlgorithmConfig()))
    (of_policy_N,) = torch.autograd.grad(loss_of(only_policy, inputs, one_rank), inputs.logprobs_N)
    assert (of_logprobs_N - of_policy_N).tolist() == pytest.approx([0.5 / 15] * 15, rel=1e-13)  # k1: of every token


def test_terms_that_are_off_are_not_there():
    names = lambda **algorithm: [
        t.name for t in losses.policy_loss(config_of("sum", AlgorithmConfig(**algorithm))).terms
    ]
    assert names() == ["policy_loss"]
    assert names(kl_coef=0.1) == ["policy_loss", "kl_loss"]
    assert names(kl_coef=0.1, kl_in="reward", entropy_coef=1.0) == ["policy_loss", "entropy_term"]
