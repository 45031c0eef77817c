"""What is said of earlier releases is what their arithmetic gives: micro-batch by micro-batch, rank by rank, in numpy.

Each oracle adds up the losses of a small ragged batch as the release did. The number that its trainer documents, times
the factor of the table, must be that.
"""

import numpy as np
import pytest

from isoloss.tools.migrate.__main__ import main
from isoloss.tools.migrate.releases import PASTS, Past, Sizes, in_effect

GENERATOR = np.random.default_rng(1)
RANKS = [[[GENERATOR.standard_normal(n) for n in row] for row in rank] for rank in (((3, 7), (5, 4)), ((2, 9), (4, 6)))]
OTHER_TOKENS = 40  # of the other step that the same generated batch feeds: as many as here
ROWS = [row for rank in RANKS for row in rank]
SEQUENCES = [losses for row in ROWS for losses in row]
LENGTHS = [[[len(losses) for losses in row] for row in rank] for rank in RANKS]
D, K, S, L = 2, 2, len(SEQUENCES), 12
TOKENS = sum(map(len, SEQUENCES))
SIZES = Sizes(ranks=D, micro_batches=K, sequences=S, steps=2)


def total(row) -> float:
    return sum(float(losses.sum()) for losses in row)


def tokens(row) -> int:
    return sum(map(len, row))


def over_ranks(of_row) -> float:
    """The mean over ranks of what each adds up over its micro-batches."""
    return float(np.mean([sum(of_row(row) for row in rank) for rank in RANKS]))


def mean_of_means() -> float:
    return over_ranks(lambda row: total(row) / tokens(row) / K)


TOKEN_MEAN, SEQ_MEAN_SUM = total(SEQUENCES) / TOKENS, total(SEQUENCES) / S
# Of each row with a number: what the release computed, and what its trainer documents, where that is no mean of means.
ARITHMETIC = {
    ("verl", "fine-tuning"): (mean_of_means, None),
    ("verl", "seq-mean-* on the engines"): (lambda: over_ranks(lambda row: total(row) / (S * D)), SEQ_MEAN_SUM),
    ("verl", "seq-mean-token-sum-norm"): (lambda: over_ranks(lambda row: total(row) / L), SEQ_MEAN_SUM / L),
    ("verl", "the critic on the engines"): (lambda: over_ranks(lambda row: total(row) / tokens(row)), None),
    ("verl", "supervised distillation"): (mean_of_means, None),
    ("verl", "token-mean on the older workers"): (
        lambda: over_ranks(lambda row: total(row) / tokens(row) * len(row) / (S / D)), None),
    ("verl", "token-sum"): (lambda: over_ranks(lambda row: total(row) * D), None),
    ("skyrl", "token_mean"): (mean_of_means, None),
    ("skyrl", "token_mean_legacy"): (mean_of_means, None),
    ("skyrl", "cross-entropy of fine-tuning, a sum by its documentation"): (
        lambda: over_ranks(lambda row: total(row) / K), total(SEQUENCES)),
    ("trl", "bnpo"): (mean_of_means, None),
    ("trl", "dapo, cispo, vespo"): (
        lambda: over_ranks(lambda row: total(row) / ((TOKENS + OTHER_TOKENS) / D)), TOKEN_MEAN),
    ("trl", "GKD, GOLD and distillation (JSD)"): (mean_of_means, None),
    ("ms-swift", "GRPO and GKD on Megatron"): (mean_of_means, None),
    ("ms-swift", "packed DPO"): (lambda: over_ranks(lambda row: total(row) / len(row) / K), None),
    ("ms-swift", "GKD on transformers"): (mean_of_means, None),
    ("nemo-rl", "VAPO's likelihood of right answers"): (
        lambda: over_ranks(lambda row: total(row) / tokens(row) * D), None),
    ("nemo-rl", "the ratio of cross-entropy and distillation"): (mean_of_means, None),
}  # fmt: skip


def weighted(past: Past) -> float:
    assert past.weights is not None
    return sum(weight * float(losses.sum()) for weight, losses in zip(past.weights.weights(LENGTHS), SEQUENCES))


def test_the_generated_batch_of_the_oracle_feeds_two_equal_steps():
    assert TOKENS == OTHER_TOKENS and SIZES.steps == 2


@pytest.mark.parametrize("past", PASTS, ids=lambda past: f"{past.trainer} {past.loss}")
def test_a_row_is_what_its_release_computed(past):
    if (past.trainer, past.loss) not in ARITHMETIC:
        assert not past.formula and past.weights is None, "a number without arithmetic"
        return
    computed, documented = ARITHMETIC[past.trainer, past.loss]
    base = weighted(past) if documented is None else documented
    factor = past.factor(SIZES)
    assert factor * base == pytest.approx(computed(), rel=1e-12)
    if past.formula:
        values = {name: value for name, value in vars(SIZES).items() if value is not None}
        said = eval(past.formula.replace("^", "**").replace(" x ", " * "), {}, values)
        assert said == pytest.approx(factor)


def test_one_pair_in_a_micro_batch_and_three_in_another_weigh_as_reported():
    """ms-swift PR 10144: 1/2, 1/6, 1/6, 1/6."""
    (past,) = [past for past in PASTS if past.loss == "packed DPO"]
    assert past.weights is not None
    assert past.weights.weights([[[1], [1, 1, 1]]]) == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


@pytest.mark.parametrize(
    ("trainer", "release", "of", "holds"),
    [
        ("verl", "2025-11-02", "fine-tuning", True),
        ("verl", "2025-11-03", "fine-tuning", False),
        ("verl", "2025-12-16", "seq-mean-* on the engines", False),
        ("verl", "2025-12-17", "seq-mean-* on the engines", True),
        ("verl", "2026-01-03", "seq-mean-* on the engines", False),
        ("verl", "2026-08-03", "token-sum", True),
        ("skyrl", "2026-03-08", "token_mean", True),
        ("skyrl", "2026-03-09", "token_mean", False),
        ("trl", "2026-07-30", "dapo, cispo, vespo", True),
        ("nemo-rl", "2026-11-01", "VAPO's likelihood of right answers", True),
    ],
)
def test_a_release_is_that_of_its_day(trainer, release, of, holds):
    assert (of in [past.loss for past in in_effect(trainer, release)]) == holds


VERL = ["verl", "algorithm.adv_estimator=grpo", "data.train_batch_size=256", "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=4"]  # fmt: skip
MODE = "actor_rollout_ref.actor.loss_agg_mode"
TRL = ["trl", "num_generations=4", "per_device_train_batch_size=8", "processes=2"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*VERL, f"{MODE}=seq-mean-token-sum", "--release", "2025-12-20"], "1 / ranks^2 = 0.0625 times"),
        ([*VERL, f"{MODE}=seq-mean-token-sum-norm", "--release", "2026-02-01"], "sequences / ranks = 256 times"),
        ([*VERL, f"{MODE}=token-mean", "--release", "2026-02-01"], "nothing is known of verl of 2026-02-01"),
        ([*VERL[:-1], f"{MODE}=seq-mean-token-sum", "--release", "2025-12-20"], "give ranks=N"),
        (["verl", "data.train_batch_size=8", "--release", "2025-10-01"], "fine-tuning (until 2025-11-03, PR 3994)"),
        ([*TRL, "steps_per_generation=4", "--release", "2026-05-01"], "1 / steps = 0.25 times"),
        ([*TRL, "steps_per_generation=4", "--release", "2026-08-01"], "the day of its merge is not known"),
        (["skyrl", "--release", "2026-03-01", "ranks=8", "micro_batches=4"], "among 32 micro-batches"),
        (["nemo-rl", "--release", "2026-10-01", "ranks=8", "micro_batches=4"], "micro_batches x ranks = 32 times"),
        (["ms-swift", "--release", "2026-08-01"], "hinge and ipo of DPO"),
    ],
)
def test_the_report_says_by_which_factor_it_was_off(argv, says, capsys):
    assert main(argv) == 0
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["skyrl", "ranks=8"], "isoloss reads no configurations of SkyRL; give --release"),
        (["skyrl", "--release", "v0.5"], "--release v0.5: must be a day"),
        (["skyrl", "--release", "2026-02-30"], "--release 2026-02-30: must be a day"),
        (["nemo-rl", "--release", "2026-02-01", "ranks=no"], "cannot read 'ranks=no'"),
        (["nemo-rl", "--release", "2026-02-01", "gpus=8"], "cannot read 'gpus=8'"),
    ],
)
def test_a_release_that_is_no_day_is_a_mistake(argv, says, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
