"""Long context: what Ulysses, ring and their grid move and hold, per rank, at 32k tokens.

    python benchmarks/context_scaling.py [--out context_scaling.json] [--tokens 32768] [--layers 4]

One optimizer step's forward and backward on one packed row, on every grid of at most 8 ranks. Two records:
bytes that each rank sends inside attention, per layer, counted at the collectives, against the formula of
docs/parallelism.md, which must be met exactly; and the peak of a rank's activations, which must fall as
1/(ulysses x ring) within 15 %. The peak is the largest resident set during the step (VmHWM, reset before it), less the
resident set before; weights, gradient buffers and a small warm-up step are there already.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from logprob_memory import MIB, of_status

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, ModelConfig, ParallelConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, negative_log_likelihood
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.kind import SoftmaxAttention
from isoloss.parallel import Layout
from isoloss.parallel.attention import kv_repeats

GRIDS = (
    "1",
    "ulysses2",
    "ring2",
    "ulysses4",
    "ring4",
    "ulysses2+ring2",
    "ulysses8",
    "ulysses4+ring2",
    "ulysses2+ring4",
)
CLAIM = 0.15  # how far the peak may be from that of one rank / (ulysses x ring)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def formula(arch: Architecture, layout: Layout, tokens: int, size: int = 4) -> int:
    """Bytes that a rank sends per layer in a forward and a backward; `size` bytes an element (docs/parallelism.md)."""
    ulysses, ring = layout.ulysses, layout.ring
    kind = arch.attentions[0]
    assert isinstance(kind, SoftmaxAttention)
    kv_heads = kind.kv_heads * kv_repeats(kind.heads, kind.kv_heads, ulysses)
    pair = kv_heads * (kind.head_dim + kind.value_dim)
    queries, outputs = kind.heads * kind.head_dim, kind.heads * kind.value_dim
    exchanged = 2 * (ulysses - 1) * (tokens // (ulysses * ring)) * (queries + pair + outputs) // ulysses
    passed = (3 * ring - 2 if ring > 1 else 0) * (tokens // ring) * pair // ulysses
    return (exchanged + passed) * size


@contextmanager
def counted() -> Iterator[list[int]]:
    """Within it every byte sent to another rank by an all-to-all or a message is written down."""
    sent: list[int] = []
    exchange, pass_on = dist.all_to_all_single, dist.batch_isend_irecv

    def all_to_all_single(output, input, *args, group, **kwargs):
        sent.append(input.nbytes * (group.size() - 1) // group.size())
        return exchange(output, input, *args, group=group, **kwargs)

    def batch_isend_irecv(messages):
        sent.extend(message.tensor.nbytes for message in messages if message.op is dist.isend)
        return pass_on(messages)

    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all_single),
        mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv),
    ):
        yield sent


def documents(tokens: int) -> list[Sample]:
    """One long document, a middle one, and short ones of lengths that nothing divides; every token a target."""
    random = torch.Generator().manual_seed(0)
    lengths = [tokens // 2 + 1, tokens // 4 + 13]
    while sum(lengths) + 701 <= tokens:
        lengths.append(701)
    lengths.append(tokens - sum(lengths))
    of_lengths = (torch.randint(MODEL["vocab_size"], (n,), generator=random) for n in lengths if n > 1)
    return [Sample(of_length, torch.arange(len(of_length)) > 0) for of_length in of_lengths]


def measure(folder: str, text: str, tokens: int) -> dict:
    """What this rank sends and holds; on rank 0 the sum of the first and the largest of the second over the ranks."""
    layout = Layout.parse(text)
    parallel = ParallelConfig(ulysses=layout.ulysses, ring=layout.ring)
    config = Config(ModelConfig(folder, from_scratch=True), batch=BatchConfig(max_tokens=tokens), parallel=parallel)
    engine = Engine(config)
    loss = Loss.of(negative_log_likelihood)
    engine.forward_backward(documents(256), loss)  # loads kernels, connects the ranks
    engine.zero_grad()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = of_status("VmRSS"), time.perf_counter()
    with counted() as sent:
        metrics = engine.forward_backward(documents(tokens), loss)
    seconds = time.perf_counter() - start
    mine = {"peak": of_status("VmHWM") - before, "sent": sum(sent)}
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    per_layer = {of_rank["sent"] / engine.arch.num_layers for of_rank in everyone}
    return {
        "layout": text,
        "ranks": layout.context,
        "sent_per_layer": sorted(per_layer),
        "formula": formula(engine.arch, layout, metrics.total_tokens),
        "peak_bytes": max(of_rank["peak"] for of_rank in everyone),
        "loss": metrics.loss,
        "seconds": seconds,
    }


def in_a_world(folder: str, text: str, tokens: int) -> dict:
    ranks = str(Layout.parse(text).context)
    launcher = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        ranks,
    ]
    child = json.dumps([folder, text, tokens])
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, __file__, "--child", child], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the row, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        row = measure(*json.loads(args.child))
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
        return 0

    versions = {"python": platform.python_version(), "torch": torch.__version__, "device": f"{platform.machine()} CPU"}
    print(f"{versions}; {args.tokens} tokens, {args.layers} layers, hidden {MODEL['hidden_size']}, fp32, gloo")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = MODEL | {"num_hidden_layers": args.layers, "max_position_embeddings": args.tokens}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for text in GRIDS:
            row = in_a_world(folder, text, args.tokens)
            rows.append(row)
            row["bytes_met"] = row["sent_per_layer"] == [row["formula"]]
            row["scaling"] = row["peak_bytes"] * row["ranks"] / rows[0]["peak_bytes"]
            print(
                f"{text:15} sends {row['sent_per_layer'][0] / MIB:8.3f} MiB a layer (formula "
                f"{'met' if row['bytes_met'] else 'NOT met: ' + str(row['formula'])}); peak "
                f"{row['peak_bytes'] / MIB:7.1f} MiB, x ranks / one rank {row['scaling']:.3f}; loss {row['loss']:.6f}; "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
    holds = all(row["bytes_met"] and abs(row["scaling"] - 1) <= CLAIM for row in rows)
    print("both records hold" if holds else "a record does NOT hold")
    if args.out:
        args.out.write_text(json.dumps({"versions": versions, "tokens": args.tokens, "rows": rows}, indent=2) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
