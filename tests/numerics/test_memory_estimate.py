"""The estimate of a step's memory, from one counted layer of each kind, equals the count of a dry run."""

import json

import pytest
from support.models import families, published
from support.plans import dry_runs
from support.plans.asked import asked_for

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.estimate import step_memory
from isoloss.models.families.registry import read_architecture
from isoloss.recipes.launch import compose_config
from isoloss.tools.plan.report import RankReport

# The dry runs of all rows are made at once, before the first: on a slow machine in more than the usual five minutes.
pytestmark = pytest.mark.timeout(1200)
# Fewer layers than are published, by which the estimate multiplies.
FEWER = {"num_hidden_layers": 8, "max_position_embeddings": 262144}
# The sizes of gpt-oss-20b, with 8 of 24 layers.
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
           "head_dim": 64, "num_hidden_layers": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
           "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072}  # fmt: skip
# Those of MiniMax-M2, with 8 of 62 layers and 32 of 256 experts.
MINIMAX_M2 = {"hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8,
              "head_dim": 128, "rotary_dim": 64, "num_hidden_layers": 8, "num_local_experts": 32,
              "num_experts_per_tok": 8, "vocab_size": 200064, "max_position_embeddings": 196608}  # fmt: skip
# Those of MiMo-V2-Flash, with 8 of 48 layers and 32 of 256 experts.
MIMO = {"hidden_size": 4096, "intermediate_size": 16384, "moe_intermediate_size": 2048, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "num_hidden_layers": 8,
        "n_routed_experts": 32, "n_group": 1, "num_experts_per_tok": 8, "vocab_size": 152576,
        "max_position_embeddings": 262144, "rope_parameters": None}  # fmt: skip
# Those of Gemma 4 31B, with 12 of 60 layers.
GEMMA_4 = {"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
           "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024,
           "num_hidden_layers": 12, "vocab_size": 262144, "max_position_embeddings": 262144}  # fmt: skip
# Of Qwen3.5, with 8 of 64 and of 40 layers. What transformers has as defaults is written out: vocabulary, widths of
# heads, and all of 35B-A3B.
DELTA = {"num_hidden_layers": 8, "full_attention_interval": 4, "head_dim": 256, "linear_num_key_heads": 16,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
         "max_position_embeddings": 262144}  # fmt: skip
QWEN_35B_A3B = {"hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                "num_experts": 256, "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 2,
                "linear_num_value_heads": 32}  # fmt: skip
# Those of GLM-4.7-Flash, with 8 of 47 layers.
GLM_47_FLASH = {
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "num_hidden_layers": 8,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}
MODELS = {
    "8b": published.QWEN3_8B | FEWER,
    "32b": published.QWEN3_32B | FEWER,
    "30b-a3b": published.QWEN3_30B_A3B | FEWER,
    "70b": published.LLAMA_70B | {"num_hidden_layers": 16},
    "gpt-oss": families.published("gpt-oss", **GPT_OSS),
    "minimax-m2": families.published("minimax-m2", **MINIMAX_M2),
    "mimo-v2-flash": families.published("mimo-v2-flash", **MIMO),
    "gemma-4": families.published("gemma-4", **GEMMA_4),
    "26b-a4b": published.GEMMA_4_26B_A4B | {"layer_types": None, "num_hidden_layers": 12},
    "qwen3.5-27b": published.QWEN35_27B | FEWER,
    "qwen3.5-35b-a3b": families.published("qwen3.5-moe", **DELTA, **QWEN_35B_A3B),
    "ministral-3": families.published(
        "ministral-3",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=8,
        vocab_size=131072,
        max_position_embeddings=262144,
    ),
    "glm-4.7-flash": families.published("glm-4.7-flash", **GLM_47_FLASH),
    "deepseek": families.published("deepseek-v3", **GLM_47_FLASH),  # the same layers by another name
}
KEEP, FULL = "memory.recompute=none", "memory.recompute=full"
ROWS = (
    ("8b", 8, 0, "parallel.tp=2", KEEP),
    ("8b", 8, 0, "parallel.tp=2", KEEP, "parallel.grad_reduce_dtype=bf16"),
    ("8b", 8, 0, "parallel.tp=1", FULL),
    ("8b", 64, 0, "parallel.tp=4", "memory.recompute=selective", "memory.recompute_modules=[layernorm,mlp]"),
    ("8b", 8, 0, "parallel.tp=2", "memory.recompute=selective", "memory.recompute_modules=[mlp_act]"),
    ("8b", 8, 0, "parallel.tp=2", FULL, "memory.recompute_layers=3"),
    ("8b", 16, 0, "parallel.tp=2", "parallel.ulysses=4", "parallel.ring=2", "batch.max_tokens=131072", FULL),
    ("8b", 16, 0, "parallel.tp=2", "parallel.ulysses=4", "batch.max_tokens=65536", KEEP),
    ("8b", 16, 0, "parallel.tp=2", "parallel.ring=4", "batch.max_tokens=65536", KEEP),
    ("32b", 16, 0, "parallel.tp=8", "parallel.pp=2", KEEP),
    ("32b", 16, 8, "parallel.tp=8", "parallel.pp=2", KEEP),
    ("32b", 16, 0, "parallel.tp=8", "parallel.pp=2", "parallel.vpp=2", KEEP),
    ("8b", 16, 0, "parallel.tp=8", "parallel.pp=2", "parallel.vpp=2", "batch.max_tokens=65536", FULL),
    ("70b", 32, 8, "parallel.tp=8", "parallel.pp=4", "parallel.vpp=2", KEEP),
    ("70b", 32, 24, "parallel.tp=8", "parallel.pp=4", "parallel.vpp=2", KEEP),
    ("30b-a3b", 16, 0, "parallel.ep=8", KEEP),
    ("30b-a3b", 16, 0, "parallel.ep=8", "memory.recompute=selective", "memory.recompute_modules=[layernorm,moe]"),
    ("30b-a3b", 16, 0, "parallel.ep=8", "memory.recompute=selective", "memory.recompute_modules=[experts]"),
    ("30b-a3b", 16, 0, "parallel.ep=8", KEEP, "moe.dispatch_bound=1.5"),
    ("30b-a3b", 16, 0, "parallel.ep=8", KEEP, "kernels.grouped_experts=false"),
    ("30b-a3b", 16, 0, "parallel.ep=8", "parallel.tp=2", FULL),
    ("30b-a3b", 16, 0, "parallel.ep=4", "parallel.tp=2", "parallel.etp=2", KEEP),
    ("gpt-oss", 8, 0, "parallel.ep=8", KEEP),
    ("minimax-m2", 8, 0, "parallel.ep=4", "parallel.tp=2", KEEP),
    ("mimo-v2-flash", 8, 0, "parallel.ep=8", KEEP),
    ("mimo-v2-flash", 16, 0, "parallel.ep=4", "parallel.tp=2", "parallel.ulysses=2", "batch.max_tokens=65536", KEEP),
    ("mimo-v2-flash", 16, 0, "parallel.ep=4", "parallel.tp=2", FULL),
    ("mimo-v2-flash", 16, 0, "parallel.ep=4", "parallel.tp=2", "parallel.ring=2", "memory.recompute=selective"),
    ("gemma-4", 8, 0, "parallel.tp=4", KEEP),
    ("gemma-4", 16, 0, "parallel.tp=4", "parallel.ulysses=2", "batch.max_tokens=32768", KEEP),
    ("gemma-4", 16, 0, "parallel.tp=2", "parallel.ring=2", "parallel.pp=2", "memory.recompute=selective"),
    ("gemma-4", 16, 0, "parallel.tp=4", "parallel.pp=2", FULL),
    ("26b-a4b", 8, 0, "parallel.ep=8", "parallel.tp=2", KEEP),
    ("qwen3.5-27b", 8, 0, "parallel.tp=4", "memory.recompute=selective"),
    ("qwen3.5-27b", 16, 0, "parallel.tp=8", KEEP),
    ("qwen3.5-27b", 16, 0, "parallel.tp=4", FULL),
    ("qwen3.5-27b", 16, 0, "parallel.tp=4", "parallel.pp=2", KEEP),
    ("qwen3.5-27b", 16, 0, "parallel.tp=2", "parallel.ulysses=2", "parallel.ring=2", "batch.max_tokens=16384", KEEP),
    ("qwen3.5-35b-a3b", 16, 0, "parallel.ep=8", "parallel.tp=2", KEEP),
    ("qwen3.5-35b-a3b", 16, 0, "parallel.ep=8", "parallel.ring=2", KEEP),
    ("qwen3.5-35b-a3b", 8, 0, "parallel.ep=8", FULL),
    ("8b", 8, 0, "parallel.tp=1", "lora.rank=32", KEEP),
    ("8b", 8, 0, "parallel.tp=2", "lora.rank=32", FULL),
    ("8b", 16, 0, "parallel.tp=2", "parallel.ulysses=4", "batch.max_tokens=65536", "lora.rank=8", KEEP),
    ("70b", 8, 0, "parallel.tp=8", "lora.rank=32", KEEP),
    ("32b", 16, 8, "parallel.tp=4", "parallel.pp=2", "lora.rank=64", "lora.targets=[mlp]", KEEP),
    ("30b-a3b", 8, 0, "parallel.ep=8", "lora.rank=32", "lora.expert_rank=8", KEEP),
    ("qwen3.5-27b", 8, 0, "parallel.tp=4", "lora.rank=16", KEEP),
    ("glm-4.7-flash", 8, 0, "parallel.ep=8", "lora.rank=16", "lora.targets=[attention]", KEEP),
)


NAMES = {"-".join(map(str, row)): row for row in ROWS}


@pytest.fixture(scope="module")
def planned(request, tmp_path_factory) -> dict[str, tuple[dry_runs.Row, RankReport]]:
    """By name, the rows that tests ask for and their dry runs."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    asked = asked_for(request)
    rows = {
        name: dry_runs.Row("sft", overrides(folder, model, keys), world, rank)
        for name, (model, world, rank, *keys) in NAMES.items()
        if name in asked
    }
    return dict(zip(rows, zip(rows.values(), dry_runs.in_a_process([*rows.values()], folder / "rows.json"))))


def overrides(folder, name, keys):
    return [f"model.path={folder / name}", "train.precision=bf16", "batch.max_tokens=8192", *keys]


@pytest.mark.parametrize("name", NAMES)
def test_it_gives_what_a_dry_run_counts(planned, name):
    row, report = planned[name]
    config = compose_config("sft", Config, row.overrides)[0]
    layout = config.parallel.layout().with_world(row.world)
    stage = step_memory(config, read_architecture(config.model.path), layout)[report.stage]
    kinds = report.peak.peak_kinds
    resident = kinds["weights"] + kinds["gradients"] + kinds["optimizer"]
    assert stage.weights + stage.gradients + stage.optimizer == pytest.approx(resident, rel=0.001)
    assert stage.peak == pytest.approx(report.peak.peak, rel=0.005)
    assert stage.activations == pytest.approx(report.peak.peak - resident, rel=0.015)
