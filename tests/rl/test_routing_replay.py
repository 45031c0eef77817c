"""The trained model records the experts that it chose while it generated: a trainer that replays them has the
rollout's log-probability of every token, and one that does not has others."""

import json

import numpy as np
import pytest
import torch
from support.models.decoders import decoder
from support.models.families import VOCAB, published
from support.ranks.routed_rollouts import rollout
from support.runs import rl_runs
from support.runs.runs import metrics_of

from isoloss.engine.config import rules
from isoloss.engine.config.schema import ModelConfig
from isoloss.engine.rl.config import RLConfig, RolloutConfig
from isoloss.engine.rl.routes import continued, known_rows
from isoloss.engine.rl.trajectory import Request, Sampling
from isoloss.parallel import Layout, UserError

SAMPLING = Sampling(max_new_tokens=12, stop_token_ids=tuple(range(0, VOCAB, 31)), seed=3)
LAYOUTS = {"tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "ep2": (2, {"ep": 2}), "ring2": (2, {"ring": 2})}


def make_requests(count: int = 7) -> list[Request]:
    """Two completions of a prompt."""
    random = torch.Generator().manual_seed(6)
    prompts = [torch.randint(VOCAB, (1 + 11 * k % 37,), generator=random).tolist() for k in range(count)]
    return [Request(f"{k // 2}/{k}", tuple(prompts[k // 2])) for k in range(count)]


def test_noise_on_the_samplers_router_is_replayed(pool, tiny_hf):
    """Also what was sampled before an abort: its rows stay, and are there once."""
    for cut in (None, 4):
        (found,) = pool.run(1, rollout, tiny_hf("qwen3-moe"), make_requests(), SAMPLING, {}, 1e-6, cut)
        assert found.replayed <= 1e-5 < 1e-2 < found.live
        for tokens, request, routes in zip(found.tokens, make_requests(), found.routes, strict=True):
            assert routes.shape == (len(request.prompt_tokens) + len(tokens), 2, 3)
            assert (routes[:-1] >= 0).all() and (routes[-1] == -1).all()
        total = sum(map(len, found.routes))
        assert found.part == pytest.approx((total - len(found.routes)) / total, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ("qwen3-moe", "deepseek-v3"))
def test_every_layout_records_the_same(pool, tiny_hf, family, layout):
    """Each rank has its layers, or its tokens, alone; and dense layers have no rows."""
    world, parallel = LAYOUTS[layout]
    asked = tiny_hf(family, num_hidden_layers=4), make_requests(), SAMPLING
    (wanted,) = pool.run(1, rollout, *asked, {}, 0.0)
    assert wanted.routes[0].shape[1] == 4 - (family == "deepseek-v3")
    for found in pool.run(world, rollout, *asked, parallel, 0.0):
        assert found.tokens == wanted.tokens and found.replayed <= 2e-5
        assert all(np.array_equal(np.sort(one), np.sort(two)) for one, two in zip(found.routes, wanted.routes))


def rows(*experts: int) -> np.ndarray:
    return np.array(experts, dtype=np.int16)[:, None, None]


def test_a_completion_that_goes_on_keeps_its_first_rows():
    first, then = rows(5, 6, -1), rows(9, 9, 7, 8, -1)
    joined = continued(first, then, 5)
    assert joined is not None and joined.ravel().tolist() == [5, 6, 7, 8, -1]
    assert continued(None, then, 5) is then and continued(None, None, 5) is None
    alone = continued(first, None, 5)
    assert alone is not None and alone.ravel().tolist() == [5, 6, -1, -1, -1]
    assert [known_rows(each) for each in (first, joined, None, rows(1, 2), rows(-1))] == [2, 4, 0, 2, 0]


@pytest.mark.parametrize("layout", ("1", "pp2"))
def test_a_run_replays_its_own_rollouts(pool, tmp_path, layout):
    """Two optimizer steps a batch, a reference, and prompts that are computed once. Only last tokens have no row."""
    inputs = rl_runs.write_inputs(tmp_path)
    small = json.loads((inputs / "model/config.json").read_text())
    kept = {name: small[name] for name in ("vocab_size", "max_position_embeddings")}
    (inputs / "model/config.json").write_text(json.dumps(published("qwen3-moe", **kept)))
    config = rl_runs.config_of(
        inputs, tmp_path / "run", layout, "rollout.backend=megatron", "rollout.routing_replay=true",
        "algorithm.kl_coef=0.1", "algorithm.minibatches=2", "train.steps=4", "batch.share_prefixes=true",
    )  # fmt: skip
    pool.run(Layout.parse(layout).world_size, rl_runs.train, config)
    rows = metrics_of(config)
    assert len(rows) == 4 and all(0.8 < row["routes_replayed"] < 1 for row in rows)
    assert all(row["train_rollout_logprob_diff"] <= 1e-5 for row in rows[::2])


def test_a_dense_model_is_refused():
    config = RLConfig(ModelConfig("dense"), rollout=RolloutConfig(backend="megatron", routing_replay=True))
    dense = decoder(2, 48, (8, 4, 6), 72, 100)
    with pytest.raises(
        UserError, match=r"rollout.routing_replay=true is for mixture-of-experts models and this one is"
    ):
        rules.check(config, dense, Layout())
