"""What tools.migrate says of a trainer's loss is what the trainer computes, and "the same number" is the same number.

The oracles below add up the losses of a small ragged batch as each trainer's own code does: micro-batch by micro-batch
on each rank, with its scalings, and the mean over ranks that data parallelism takes of gradients.
"""

import numpy as np
import pytest
import torch

from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.normalizer import TokenCounts, token_weights
from isoloss.tools.migrate.__main__ import READERS
from isoloss.tools.migrate.result import migrate

# Of two ranks, two micro-batches of two sequences: their target tokens. One sequence has none.
RANKS = (((3, 7), (5, 0)), ((2, 9), (4, 6)))
OTHER_STEP = (((1, 8), (2, 2)), ((6, 5), (3, 4)))  # fed by the same generated batch
GENERATOR = np.random.default_rng(0)
LOSSES = [[[GENERATOR.standard_normal(n) for n in row] for row in rank] for rank in RANKS]
SEQUENCES = [losses for rank in LOSSES for row in rank for losses in row]
D, GAS, ROWS, WIDTH = 2, 2, 2, 12  # ranks, micro-batches of each, sequences of a micro-batch, padded width


def over_ranks(loss) -> float:
    """The mean over ranks of the sum of what `loss(row)` backpropagates for each micro-batch."""
    return float(np.mean([sum(loss(row) for row in rank) for rank in LOSSES]))


def total(row) -> float:
    return sum(losses.sum() for losses in row)


def tokens(ranks) -> int:
    return sum(n for rank in ranks for row in rank for n in row)


def token_mean(losses) -> float:
    return losses.sum() / max(len(losses), 1)


def verl_engine(mode):
    """verl/trainer/ppo/core_algos.py, agg_loss, with the counts of the whole mini-batch."""
    samples = D * GAS * ROWS
    return over_ranks({
        "token-mean": lambda row: total(row) / tokens(RANKS) * D,
        "token-sum": lambda row: total(row) * D,
        "seq-mean-token-sum": lambda row: total(row) / samples * D,
        "seq-mean-token-sum-norm": lambda row: total(row) / samples * D / WIDTH,
        "seq-mean-token-mean": lambda row: sum(map(token_mean, row)) / samples * D,
    }[mode])  # fmt: skip


def verl_older_workers(mode):
    """verl/workers/actor/dp_actor.py: agg_loss of the micro-batch x its share of the rank's samples."""
    share, valid = 1 / GAS, lambda row: sum(len(losses) > 0 for losses in row)
    return over_ranks({
        "token-mean": lambda row: total(row) / sum(map(len, row)) * share,
        "seq-mean-token-sum": lambda row: total(row) / valid(row) * share,
        "seq-mean-token-mean": lambda row: sum(map(token_mean, row)) / valid(row) * share,
    }[mode])  # fmt: skip


def trl_grpo(loss_type):
    """trl/trainer/grpo_trainer.py, compute_loss; num_items_in_batch is of the generated batch, here this step alone."""
    return over_ranks({
        "grpo": lambda row: np.mean([token_mean(losses) for losses in row]) / GAS,
        "bnpo": lambda row: total(row) / sum(map(len, row)) / GAS,
        "dr_grpo": lambda row: total(row) / (ROWS * WIDTH) / GAS,
        "dapo": lambda row: total(row) / (tokens(RANKS) / D),
        "cispo": lambda row: total(row) / (tokens(RANKS) / D),
    }[loss_type])  # fmt: skip


def trl_of_two_steps():
    return over_ranks(lambda row: total(row) / ((tokens(RANKS) + tokens(OTHER_STEP)) / D))


def trl_sft(across: bool):
    """transformers' Trainer: the sum over the items of the window, of all processes or of each."""
    if across:
        return over_ranks(lambda row: total(row) / tokens(RANKS) * D)
    return float(np.mean([sum(map(total, rank)) / tokens([lengths]) for rank, lengths in zip(LOSSES, RANKS)]))


def slime_loss(per_token: bool):
    """slime/backends/megatron_utils/loss.py; Megatron divides by micro-batches and ranks, or by the tokens reported."""
    if per_token:
        reported = sum(max(n, 1) for rank in RANKS for row in rank for n in row)
        return sum(total(row) for rank in LOSSES for row in rank) / reported
    samples = D * GAS * ROWS
    return over_ranks(lambda row: sum(map(token_mean, row)) * GAS / samples * D / GAS)


VERL = ["algorithm.adv_estimator=grpo", "data.train_batch_size=256", "actor_rollout_ref.rollout.n=4"]
MODE, OLDER = "actor_rollout_ref.actor.loss_agg_mode", "trainer.use_legacy_worker_impl=auto"
FACTOR = f"actor_rollout_ref.actor.loss_scale_factor={WIDTH}"
TRL = [f"num_generations={ROWS * GAS}", f"per_device_train_batch_size={ROWS}", f"gradient_accumulation_steps={GAS}",
       f"processes={D}", f"max_completion_length={WIDTH}"]  # fmt: skip
SLIME = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4"]
# What is migrated, the oracle, and whether isoloss computes the same number on this batch.
CLAIMS = {
    "verl token-mean": ("verl", [*VERL, f"{MODE}=token-mean"], lambda: verl_engine("token-mean"), True),
    "verl token-sum": ("verl", [*VERL, f"{MODE}=token-sum"], lambda: verl_engine("token-sum"), True),
    "verl seq-mean-token-sum": (
        "verl", [*VERL, f"{MODE}=seq-mean-token-sum"], lambda: verl_engine("seq-mean-token-sum"), True),
    "verl seq-mean-token-sum-norm": (
        "verl", [*VERL, f"{MODE}=seq-mean-token-sum-norm", FACTOR], lambda: verl_engine("seq-mean-token-sum-norm"),
        True),
    "verl seq-mean-token-mean": (
        "verl", [*VERL, f"{MODE}=seq-mean-token-mean"], lambda: verl_engine("seq-mean-token-mean"), True),
    "verl's gspo whatever its mode": (
        "verl", [*VERL, f"{MODE}=token-mean", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
        lambda: verl_engine("seq-mean-token-mean"), True),
    "verl sft": ("verl", ["data.train_batch_size=8"], lambda: verl_engine("token-mean"), True),
    "verl's older workers token-mean": (
        "verl", [*VERL, OLDER, f"{MODE}=token-mean"], lambda: verl_older_workers("token-mean"), False),
    "verl's older workers seq-mean-token-sum": (
        "verl", [*VERL, OLDER, f"{MODE}=seq-mean-token-sum"], lambda: verl_older_workers("seq-mean-token-sum"), False),
    "verl's older workers seq-mean-token-mean": (
        "verl", [*VERL, OLDER, f"{MODE}=seq-mean-token-mean"], lambda: verl_older_workers("seq-mean-token-mean"),
        False),
    "TRL grpo": ("trl", [*TRL, "loss_type=grpo"], lambda: trl_grpo("grpo"), True),
    "TRL bnpo": ("trl", [*TRL, "loss_type=bnpo"], lambda: trl_grpo("bnpo"), False),
    "TRL dr_grpo": ("trl", [*TRL, "loss_type=dr_grpo"], lambda: trl_grpo("dr_grpo"), True),
    "TRL dapo": ("trl", [*TRL, "loss_type=dapo"], lambda: trl_grpo("dapo"), True),
    "TRL by default": ("trl", TRL, lambda: trl_grpo("dapo"), True),
    "TRL cispo": ("trl", [*TRL, "loss_type=cispo", "epsilon_high=5"], lambda: trl_grpo("cispo"), True),
    "TRL dapo of two steps a batch": ("trl", [*TRL, "steps_per_generation=4"], trl_of_two_steps, False),
    "TRL sft": ("trl", ["learning_rate=1e-5"], lambda: trl_sft(True), True),
    "TRL sft by process": ("trl", ["average_tokens_across_devices=false"], lambda: trl_sft(False), False),
    "slime": ("slime", SLIME, lambda: slime_loss(False), True),
    "slime by token": ("slime", [*SLIME, "--calculate-per-token-loss"], lambda: slime_loss(True), False),
    "slime sft": ("slime", [*SLIME, "--loss-type", "sft_loss"], lambda: slime_loss(False), True),
    "slime sft by token": (
        "slime", [*SLIME, "--loss-type", "sft_loss", "--calculate-per-token-loss"], lambda: slime_loss(True), False),
}  # fmt: skip


def weighted(weights) -> float:
    return float(sum(weight * losses.sum() for weight, losses in zip(weights, SEQUENCES)))


def engine_loss(denominator) -> float:
    """By the engine's own weights, of the aggregation that the migrated keys ask for."""
    lengths = [len(losses) for losses in SEQUENCES]
    none = torch.zeros(0, dtype=torch.int64)
    valid = sum(n > 0 for n in lengths)
    counts = TokenCounts(torch.tensor(lengths), none, sum(lengths), len(lengths), valid, none, none)
    aggregation = Aggregation(denominator.mode, denominator.length, denominator.count_fully_masked)
    weights, _ = token_weights([torch.ones(n) for n in lengths], counts, aggregation)
    return float(sum((w.numpy() * losses).sum() for w, losses in zip(weights, SEQUENCES)))


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_statement_is_true(claim):
    trainer, words, oracle, same = CLAIMS[claim]
    result = migrate(*READERS[trainer](None, words))
    number = oracle()
    others = tokens(OTHER_STEP) if result.theirs.scope == "generated batch" else None
    assert weighted(result.theirs.weights(RANKS, others)) == pytest.approx(number, rel=1e-12)
    ours = engine_loss(result.ours)
    assert weighted(result.ours.weights(RANKS)) == pytest.approx(ours, rel=1e-12)
    assert (ours == pytest.approx(number, rel=1e-12)) == same
    assert (result.differs == []) == same


def test_verl_without_a_constant_is_said_to_divide_by_a_width():
    result = migrate(*READERS["verl"](None, [*VERL, f"{MODE}=seq-mean-token-sum-norm"]))
    assert result.theirs.length == 512 and "loss.norm_length=512" in result.lines
    assert any("width" in remark for remark in result.remarks)


def test_a_loss_that_isoloss_lacks_is_never_said_to_be_the_same():
    result = migrate(*READERS["trl"](None, [*TRL, "loss_type=sapo"]))
    assert "algorithm.loss=losses.py:sapo" in result.lines and "not one of isoloss's" in result.differs[0]


def test_the_example_of_the_report_is_worked_out():
    """Two micro-batches of 100 + 300 and 500 + 700 tokens: 1/2 x 1/400 and 1/2 x 1/1200, against 1/1600."""
    example = migrate(*READERS["trl"](None, [*TRL, "loss_type=bnpo"])).example
    assert example is not None and "weighs 2, 2, 0.667, 0.667 times" in example
    assert migrate(*READERS["trl"](None, [*TRL, "loss_type=dapo"])).example is None
