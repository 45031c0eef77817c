"""What a step asks of a GPU, counted without one, for models of 8B to 70B on the presets of H100 nodes.

    python benchmarks/device_step.py [--out device_step.json] [--only 8b_h100] [--documents 1 32] [--before FILE]

A dry run (docs/plan.md) takes a step of the preset as one rank. Of a micro-batch it counts: how often the host waits
for the device, launches, bytes that ops without matrix products read and write, and FLOPs; of the step: the peak of the
device's memory, and seconds of exchange, by the data sheet of an H100. Rows are full, of so many
documents of equal length. Exchanges of a micro-batch are those of tensor, context and expert parallelism: nothing hides
them. Exchanges of gradients and weights over data-parallel ranks (gradients_s) may hide behind the backward.

--before: figures that an earlier version wrote with --out; ratios to them are printed.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from isoloss.tools.plan.estimate import seconds_of
from isoloss.tools.plan.hardware import GPUS
from isoloss.tools.plan.phases import HALF
from isoloss.tools.plan.report import PhaseReport, RankReport
from isoloss.tools.plan.stages import dry_run

GIB, H100 = 1 << 30, GPUS["h100"]
LONG = {"max_position_embeddings": 131072}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
         "tie_word_embeddings": False}  # fmt: skip
SHAPES = {
    "8b": QWEN3 | LONG | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                          "num_hidden_layers": 36},
    "32b": QWEN3 | LONG | {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
                           "num_hidden_layers": 64},
    "70b": QWEN3 | LONG | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
                           "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
                           "num_hidden_layers": 80, "rope_theta": 5e5},
    "30b_a3b": QWEN3 | LONG | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
                               "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
                               "num_key_value_heads": 4, "num_hidden_layers": 48, "num_experts": 128,
                               "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
                               "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip
# Preset, model, GPUs, and a rank of the stage that is fullest or has most launches.
CASES = (("8b_h100", "8b", 8, 0), ("8b_128k_h100", "8b", 16, 0), ("32b_h100", "32b", 16, 0),
         ("70b_h100", "70b", 32, 8), ("30b_a3b_h100", "30b_a3b", 16, 0))  # fmt: skip


@dataclass(frozen=True)
class Row:
    """waits, launches, traffic_gb, tflop, exchange_s: of a micro-batch. waits_once, gradients_s: of a step besides."""

    preset: str
    documents: int
    waits: float
    waits_once: float
    launches: float
    traffic_gb: float
    tflop: float
    peak_gib: float
    exchange_s: float
    gradients_s: float


def measure(preset: str, shape: str, gpus: int, rank: int, documents: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        overrides = [f"preset={preset}", f"model.path={folder}", "data.train=[rows.jsonl]"]
        report = dry_run("sft", overrides, gpus, rank, "--halves", "--documents", str(documents))
    return row_of(report, preset, documents)


def row_of(report: RankReport, preset: str, documents: int) -> Row:
    whole, end = report.phase("forward and backward"), report.phase("optimizer")
    half, count = report.phase(f"forward and backward{HALF}"), report.micro_batches

    def each(of: Callable[[PhaseReport], float]) -> float:
        """Of a micro-batch: what half of them add."""
        return (of(whole) - of(half)) / (count / 2)

    def waits(phase: PhaseReport) -> int:
        return sum(times for _, _, times in phase.waits)

    return Row(
        preset, documents, each(waits), waits(whole) - count * each(waits) + waits(end),
        each(lambda phase: sum(phase.launches.values())), each(lambda phase: sum(phase.traffic.values())) / 1e9,
        each(lambda phase: sum(phase.flops.values())) / 1e12, report.peak.peak / GIB,
        each(lambda phase: seconds_of(phase, H100).exchange),
        seconds_of(whole, H100).gradients + seconds_of(end, H100).gradients,
    )  # fmt: skip


def line(name: str, row: Mapping) -> str:
    return (
        f"{name:24}{row['waits']:8.0f}+{row['waits_once']:<3.0f}{row['launches']:12.0f}{row['traffic_gb']:12.1f}"
        f"{row['tflop']:8.1f}{row['peak_gib']:14.1f}{row['exchange_s']:12.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device_step.json"))
    parser.add_argument("--only", nargs="*", default=[case[0] for case in CASES])
    parser.add_argument("--documents", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    before = {} if arguments.before is None else json.loads(arguments.before.read_text())["rows"]
    rows: dict[str, dict] = {}
    print(f"{'':24}{'waits':>12}{'launches':>12}{'GB':>12}{'TFLOP':>8}{'peak GiB':>14}{'exchange s':>12}")
    for preset, shape, gpus, rank in CASES:
        for documents in arguments.documents if preset in arguments.only else ():
            name = f"{preset} x{documents}"
            rows[name] = asdict(measure(preset, shape, gpus, rank, documents))
            print(line(name, rows[name]), flush=True)
            if name in before:
                print(line("  before", before[name]))
    versions = {name: version(name) for name in ("torch", "megatron-core")}
    arguments.out.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
