"""Loss and gradients of trajectories are those of the formulas, by transformers on each context and by hand: whatever
the aggregation and the loss, whether a trajectory is cut by branch or by turn, and on every kind of layout.

The formulas: docs/normalization.md. With T_u the targets of trajectory u, n_u their number, S the trajectories with a
target, N the sum of n_u, P the prompts with a target, N_g the targets of a prompt.
"""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from numerics.trajectories import CUTS, PROMPTS, TURNS, Case, measure, samples_of, trajectories
from support.models.experts import MODELS
from support.models.families import published, write_config, write_folder
from support.runs.optimizer_steps import fp64_model
from torch import Tensor

from isoloss.engine.config.schema import ModelConfig, MoeConfig
from isoloss.engine.rl.config import RewardConfig, RLConfig
from isoloss.parallel import Layout
from isoloss.parallel.aggregation import MODES

full = partial(pytest.param, marks=pytest.mark.full)
BY_SEQUENCE = "seq-mean-token-mean"
ICEPOP = (("importance", "token"), ("importance_beyond", "mask"), ("importance_low", 0.5), ("importance_cap", 1.5))
GEOMETRIC = (("rejection", "geometric"), ("rejection_low", 0.9), ("rejection_high", 1.1))
SEQUENCE = (("importance", "token"), ("rejection", "sequence"), ("rejection_low", 0.02), ("importance_cap", 5.0))
VETO = (("veto", 0.3), ("kl_coef", 0.3))
REMOVED = (("rejected", "removed"),)
CASES = [
    *(Case(mode) for mode in MODES),
    Case(BY_SEQUENCE, (("loss", "gspo"),)),
    Case(BY_SEQUENCE, (("loss", "gspo"), ("importance", "token"), ("kl_coef", 0.3)), True),
    Case("prompt-mean-token-mean", (("loss", "cispo"), ("clip_low", 0.1), ("clip_high", 0.1), ("dual_clip", None))),
    Case("seq-mean-token-sum", (("loss", "reinforce"), ("importance", "sequence"), ("importance_cap", 3.0))),
    Case("token-mean", (("loss", "own"),)),
    Case("seq-mean-token-sum-norm", (("loss", "own"),)),
    *(Case(mode, keys) for mode, keys in (("token-mean", ICEPOP), (BY_SEQUENCE, GEOMETRIC), ("token-mean", SEQUENCE))),
    Case(BY_SEQUENCE, VETO),
    *(Case(mode, ICEPOP + REMOVED) for mode in MODES[:5]),
    *(Case(BY_SEQUENCE, keys + REMOVED) for keys in (GEOMETRIC, SEQUENCE, VETO)),
]
# A row computes 24 cases in two cuts: one rank and one layout are quick.
LAYOUTS = ("1", "tp2", *map(full, ("1-shared", "dp2", "dp2-shared", "pp2", "ulysses2", "ring2-shared")))
MOE_LAYOUTS = ("1", "dp2", "ep2+dp2", *map(full, ("1-shared", "tp2+ep2", "pp2", "ulysses2", "ring2-shared")))
CONFIG = RLConfig(ModelConfig("anywhere"), reward=RewardConfig(function=("exact_match",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder("qwen2", tmp_path_factory.mktemp("qwen2"))


def weights_by_hand(difference: Sequence[Tensor], keys: dict) -> list[Tensor]:
    """The weight of each target, trajectory by trajectory. difference: trainer's less backend's log-probabilities."""
    found = []
    for d in difference:
        of_tokens = []
        for t in range(len(d)):
            unit = d.sum() if keys.get("importance") == "sequence" else d[t]
            weight = float(unit.exp()) if "importance" in keys else 1.0
            if keys.get("importance_beyond") == "mask":
                weight = weight if keys["importance_low"] <= weight <= keys["importance_cap"] else 0.0
            elif "importance" in keys:
                weight = min(weight, keys.get("importance_cap", 2.0))
            if "rejection" in keys:
                whole = float((d.mean() if keys["rejection"] == "geometric" else d.sum()).exp())
                inside = keys.get("rejection_low", 0.0) <= whole <= keys.get("rejection_high", float("inf"))
                weight = weight if inside else 0.0
            if "veto" in keys and min(d.exp().tolist()) < keys["veto"]:
                weight = 0.0
            of_tokens.append(weight)
        found.append(torch.tensor(of_tokens, dtype=torch.float64))
    return found


def losses_by_hand(case: Case, x: Sequence[Tensor], fields: Sequence[dict[str, Tensor]]) -> Tensor:
    """The loss of the step. x: log-probabilities of the targets of each trajectory."""
    keys = dict(case.algorithm)
    weight = weights_by_hand([f["train_logprobs"] - f["rollout_logprobs"] for f in fields], keys)
    removed = keys.get("rejected") == "removed"
    targets = [w != 0 if removed else torch.ones(len(w), dtype=torch.bool) for w in weight]
    n = [int(of_u.sum()) for of_u in targets]
    of_prompt = {group: sum(count for g, count in zip(PROMPTS, n) if g == group) for group in PROMPTS}
    N, S, P = sum(n), sum(count > 0 for count in n), sum(count > 0 for count in of_prompt.values())
    if case.count_fully_masked:
        S, P = len(n), len(of_prompt)
    total = torch.zeros((), dtype=torch.float64)
    for u, group in enumerate(PROMPTS):
        if n[u] == 0:
            continue
        xu, f, A = x[u], fields[u], fields[u]["advantages"]
        d = xu - f["train_logprobs"]
        low, high = 1 - keys.get("clip_low", 0.2), 1 + keys.get("clip_high", 0.2)
        kind = keys.get("loss", "clip")
        if kind == "clip":
            objective = torch.minimum(d.exp() * A, d.exp().clamp(low, high) * A)
            objective = torch.where(A < 0, torch.maximum(objective, 3.0 * A), objective)
        elif kind == "gspo":
            s = d.mean().exp()
            objective = torch.minimum(s * A, s.clamp(low, high) * A)
        elif kind == "cispo":
            objective = d.exp().clamp(low, high).detach() * A * xu
        elif kind == "reinforce":
            objective = A * xu
        else:
            objective = A * xu * torch.tanh(((xu - xu.mean()) ** 2 * A).mean())
        loss = -objective * (1.0 if kind == "own" else weight[u])
        if "kl_coef" in keys:
            back = f["ref_logprobs"] - xu
            loss = loss + keys["kl_coef"] * (back.exp() - 1 - back).clamp(max=10)
        divisor = {
            "token-mean": N,
            "seq-mean-token-mean": S * n[u],
            "seq-mean-token-sum": S,
            "seq-mean-token-sum-norm": S * 16,
            "prompt-mean-token-mean": P * of_prompt[group],
            "sum": 1,
        }[case.mode]
        total = total + loss[targets[u]].sum() / divisor
    return total


@pytest.fixture(scope="module")
def wanted(folder):
    """Loss and gradients of each case."""
    with fp64_model(folder) as model:
        x, fields = [], []
        for turns in trajectories():
            of_turns = []
            for turn in turns:
                logits = model(torch.tensor([turn.context + turn.reply])).logits[0, len(turn.context) - 1 : -1]
                of_turns.append(logits.log_softmax(1).gather(1, torch.tensor(turn.reply)[:, None]).squeeze(1))
            x.append(torch.cat(of_turns))
            names = turns[0].fields
            fields.append({n: torch.cat([torch.from_numpy(turn.fields[n]) for turn in turns]) for n in names})
        names, parameters = zip(*model.named_parameters())
        found = []
        for case in CASES:
            loss = losses_by_hand(case, x, fields)
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            found.append((loss.item(), dict(zip(names, gradients))))
        return found


def test_the_cases_reject_some_and_keep_some():
    for keys in (ICEPOP, GEOMETRIC, SEQUENCE, VETO):
        weights = weights_by_hand(
            [
                torch.cat([torch.from_numpy(t.fields["train_logprobs"] - t.fields["rollout_logprobs"]) for t in turns])
                for turns in trajectories()
            ],
            dict(keys),
        )
        rejected = torch.cat(weights) == 0
        assert rejected.any() and not rejected.all(), keys


@pytest.mark.parametrize("cut", CUTS)
def test_every_token_is_a_target_and_owned_once(cut):
    samples = samples_of(cut)
    sampled = sum(reply for turns in TURNS for _, _, reply in turns)
    read = sum(read for turns in TURNS for _, read, _ in turns)
    assert sum(int(sample.mask_T.sum()) for sample in samples) == sampled
    # The rewritten history of the fourth trajectory begins otherwise.
    assert sum(int(s.owned_T.sum()) for s in samples if s.owned_T is not None) == sampled + read


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_the_formulas(pool, folder, wanted, layout):
    degrees = Layout.parse(layout.partition("-")[0])
    for cut in CUTS:
        ranks = pool.run(degrees.world_size, measure, folder, CONFIG, cut, CASES, layout)
        for index, (case, (loss, gradients)) in enumerate(zip(CASES, wanted, strict=True)):
            for of_rank in ranks:
                assert of_rank.losses[index] == pytest.approx(loss, rel=1e-12, abs=1e-12), (cut, case)
                for name, gradient in of_rank.gradients[index].items():
                    error = (gradient - gradients[name]).norm() / gradients[name].norm()
                    assert error <= 1e-10, (cut, case, name)
                counted = case.keys.rejects and case.keys.rejected == "counted"
                assert (of_rank.rejected[index] is not None) == counted
            assert {n for of_rank in ranks for n in of_rank.gradients[index]} == gradients.keys()
        assert ranks[0].micro_batches[0] > 1


MOE = MoeConfig("sequence", 0.5, 0.1, bias_update_rate=0.1)
MOE_CASES = [Case("token-mean"), Case("sum"), Case(BY_SEQUENCE, (("loss", "gspo"),))]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("experts") / "model", published("glm-4.5", **MODELS["glm-4.5"]))


@pytest.fixture(scope="module")
def one_row(pool, experts):
    """Of one rank with all samples in one row, where a branch is a sample."""
    return pool.run(1, measure, experts, CONFIG, "branch", MOE_CASES, "1-whole", MOE)[0]


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_a_router_counts_every_token_of_a_trajectory_once(pool, experts, one_row, layout):
    degrees = Layout.parse(layout.partition("-")[0])
    ranks = pool.run(degrees.world_size, measure, experts, CONFIG, "turn", MOE_CASES, layout, MOE)
    for index, case in enumerate(MOE_CASES):
        for of_rank in ranks:
            assert of_rank.losses[index] == pytest.approx(one_row.losses[index], rel=1e-12), case
            for name, gradient in of_rank.gradients[index].items():
                reference = one_row.gradients[index][name]
                assert (gradient - reference).norm() <= 1e-10 * reference.norm() + 1e-14, (case, name)
        tokens = sum(int(sample.owned_T.sum()) for sample in samples_of("turn") if sample.owned_T is not None)
        routed = tokens * one_row.loads[index].shape[0] * published("glm-4.5")["num_experts_per_tok"]
        assert int(one_row.loads[index].sum()) == routed
        assert sum(int(of_rank.loads[index].sum()) for of_rank in ranks) == routed
