"""The reference changes places with the policy and back, piece by piece; on a GPU without the host."""

import json
from itertools import pairwise

import pytest
import torch
from rl import reference
from support.models import families
from support.models.families import VOCAB
from support.plans import dry_runs

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, ModelConfig, OptimConfig, TrainConfig
from isoloss.engine.memory.offload import ALIGNMENT, CHUNK, pinned_like
from isoloss.models.lora.config import LoraConfig
from isoloss.parallel import Layout
from isoloss.tools.prove.parity import freeze
from isoloss.tools.prove.proof import on_layout


@pytest.mark.parametrize("piece", (1000, 1 << 26))  # of a tensor, and more than any
@pytest.mark.parametrize("offload", (False, True))
@pytest.mark.parametrize("rank", (0, 4))
def test_it_says_what_the_policy_said_at_first(pool, tiny_hf, rank, offload, piece):
    """To the last bit, also where the policy is an adapter."""
    tokens = torch.arange(1, 60) % VOCAB
    samples = freeze([Sample(tokens[:n], tokens[:n] > 3) for n in (9, 39)])
    plain = Config(
        ModelConfig(str(tiny_hf("qwen3"))),
        batch=BatchConfig(max_tokens=64),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(),
        lora=LoraConfig(rank=rank),
    )
    given = on_layout(plain, Layout.parse("tp2"), "bf16")
    assert pool.run(2, reference.passes, given, samples, offload, piece) == [(True, True, True)] * 2


def test_rooms_of_the_host_do_not_overlap():
    tensors = [torch.empty(3), torch.empty(5, 7, dtype=torch.bfloat16), torch.empty(CHUNK + 1, dtype=torch.uint8)]
    rooms = pinned_like([*tensors, *tensors[:2], torch.empty(CHUNK - 3 * ALIGNMENT, dtype=torch.uint8)])
    assert [(room.shape, room.dtype) for room in rooms[:3]] == [(t.shape, t.dtype) for t in tensors]
    taken = sorted((room.data_ptr(), room.data_ptr() + room.nbytes) for room in rooms)
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert len({room.untyped_storage().data_ptr() for room in rooms}) == 3


def test_on_a_gpu_the_host_waits_for_no_piece(tmp_path):
    """In a dry run, whose copies to and from pageable memory are waited for."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(families.published("qwen3", **sizes)))
    keys = [f"model.path={tmp_path}", "train.precision=bf16", "batch.max_tokens=512", "data.max_length=64",
            "algorithm.kl_coef=0.1", "algorithm.reference_offload=true", "data.train=[x]", "reward.function=math",
            "rollout.backend=sglang", "rollout.servers=[http://a:1]", "rollout.max_new_tokens=32"]  # fmt: skip
    (report,) = dry_runs.in_a_process([dry_runs.Row("grpo", keys, 1, 0)], tmp_path / "rows.json")
    phase = report.phase("reference")
    assert sum(count for place, count in phase.launch_sites.items() if "rl/reference.py" in place) > 20
    assert not [each for each in phase.waits if "rl/reference.py" in each[1]]
