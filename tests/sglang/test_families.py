"""A real SGLang server has each family's weights as the trainer sends them, by the names of the published files.

Its kernels for some families need a GPU. Of those the weights alone are compared.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import families
from support.runs import rollouts
from support.servers.server_commands import SGLANG
from support.servers.servers import MODEL, requests, worst

from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.trajectory import Sampling

pytestmark = pytest.mark.sglang

PARITY = 1e-5
# To be ready without having made a token.
UNTRIED = f"env SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 {SGLANG}"
SPARSE = {
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1,
}  # fmt: skip
INTERVAL = {"full_attention_interval": 2}


@dataclass(frozen=True)
class Served:
    """changes: of the tiny model. says: what a published config.json has, SGLang reads and transformers does not
    write. why_not: what keeps SGLang from making tokens on a CPU."""

    changes: dict[str, Any] = field(default_factory=dict)
    says: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""
    options: str = ""


SERVED = {
    "llama": Served(),
    "mistral": Served({"sliding_window": None}),
    "ministral-3": Served(says={"original_max_position_embeddings": 16}),
    "qwen2": Served(),
    "mixtral": Served({"sliding_window": None}),
    "qwen3-moe": Served(),
    "glm-4.5": Served(),
    "deepseek-v3": Served(says=SPARSE, why_not="latent attention is not in torch_native"),
    "glm-4.7-flash": Served(says=SPARSE, why_not="latent attention is not in torch_native"),
    "minimax-m2": Served(
        says={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"},
        why_not="its norm of queries and keys is a kernel for CUDA",
    ),
    "mimo-v2-flash": Served(
        says={
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "layernorm_epsilon": 1e-6,
            "rope_theta": 5e6,
            "swa_rope_theta": 100.0,
            "partial_rotary_factor": 0.6,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 20,
            "swa_v_head_dim": 14,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "sliding_window_size": 8,
            "add_swa_attention_sink_bias": True,
        },
        why_not="sinks are not in torch_native",
        options="""--json-model-override-args '{{"rope_scaling": null}}'""",  # braces twice, as in a pattern
    ),
    "gpt-oss": Served(why_not="sinks are not in torch_native", options="--attention-backend triton"),
    "qwen3.5": Served(says=INTERVAL, why_not="Gated DeltaNet is a kernel"),
    "qwen3.5-moe": Served(says=INTERVAL, why_not="Gated DeltaNet is a kernel"),
    "qwen3-next": Served({"tie_word_embeddings": False}, INTERVAL, "Gated DeltaNet is a kernel"),
}


# Each has servers of its own, so the rows need not run where the other tests with servers do. Two groups and not one a
# family: a worker starts its pool of ranks once.
@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.xdist_group(f"families {index % 2}")) for index, name in enumerate(SERVED)
    ]
)
def family(request) -> str:
    return request.param


@pytest.fixture
def folders(family, tmp_path) -> list[Path]:
    """The Hugging Face folders of two models of the family that have no weight in common."""
    made = []
    for seed in (0, 1):
        model = families.make(family, seed=seed, **MODEL, **SERVED[family].changes)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):  # the same with every seed
                    parameter += 0.1 * seed
        made.append(tmp_path / f"model-{seed}")
        model.save_pretrained(made[-1])
    return made


@pytest.fixture
def rollout(backend, family, folders, unused_url, tmp_path) -> ServerBackend:
    """Of a server that was started with the first of the models, read from its files."""
    row, served = SERVED[family], tmp_path / "served"
    served.mkdir()
    for file in folders[0].iterdir():
        (served / file.name).symlink_to(file)
    config = served / "config.json"
    said = json.loads(config.read_text(encoding="utf-8")) | row.says
    config.unlink()
    config.write_text(json.dumps(said), encoding="utf-8")
    command = f"{UNTRIED if row.why_not else SGLANG} {row.options}"
    return backend(model=served, servers=(unused_url,), server_command=command)


def test_what_the_trainer_sends_is_what_the_server_has(family, folders, pool, rollout):
    """Each tensor in a bucket of its own, if it may be. First other weights, in all that the server has; then those
    that it began with; then other weights again, which the completions are of."""
    streams = [pool.run(1, rollouts.buckets, folder, 1, {})[0]["every rank"] for folder in folders]
    server = rollout._servers[0]
    (begun,) = server.checksums()
    of_model = []
    for version, stream in enumerate((streams[1], streams[0], streams[1]), start=1):
        rollout.update_weights(stream, version)
        of_model += server.checksums()
    assert [name for name, checksum in begun.items() if of_model[0][name] == checksum] == []
    assert of_model[1] == begun and of_model[2] == of_model[0]
    if not SERVED[family].why_not:
        model = families.AutoModelForCausalLM.from_pretrained(folders[1], attn_implementation="eager").eval()
        asked = requests(4, length=24)
        for request, completion in zip(asked, rollout.generate(asked, Sampling(24))):
            assert len(completion.tokens) == 24 and worst(model, request, completion) <= PARITY
