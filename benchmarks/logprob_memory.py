"""Old and reference log-probabilities: peak memory of `Engine.logprobs` as the effective batch grows.

    python benchmarks/logprob_memory.py [--out logprob_memory.json] [--budget 8192] [--hidden 256] [--layers 8]

The samples exist; what does asking for the log-probabilities of all of them take on top, at the same batch.max_tokens?
Beside it the same engine with a budget that takes the whole batch in one go, which is what a loop does that asks about
a generated batch at once. Each row runs in a process of its own, after a small warm-up call: the peak is the largest
resident set during the call (VmHWM, reset before it), less the resident set before. The allocator is told to give every
freed tensor back, so that nothing hides in memory that was freed before.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, ModelConfig
from isoloss.engine.step.engine import Engine

MIB = 1 << 20
LENGTH = 512  # tokens of a sample, half of them targets
FACTORS = (1, 2, 4, 8)
CLAIM = 1.1  # the peak at 8 times the samples over that at 1
TINY = Path(str(files("isoloss.recipes") / "assets" / "tiny"))


def write_model(folder: Path, hidden: int, layers: int) -> None:
    changes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": hidden // 4,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": LENGTH,
    }
    config = json.loads((TINY / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def of_status(key: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS, resident now; VmHWM, the most since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def measure(folder: str, tokens: int, budget: int) -> dict:
    """Bytes on top of the model and the samples, in a fresh process."""
    config = Config(ModelConfig(folder, from_scratch=True), batch=BatchConfig(max_tokens=budget))
    engine = Engine(config)
    random = torch.Generator().manual_seed(0)
    mask_T = torch.arange(LENGTH) >= LENGTH // 2
    samples = [
        Sample(torch.randint(engine.arch.vocab_size, (LENGTH,), generator=random), mask_T)
        for _ in range(tokens // LENGTH)
    ]
    engine.logprobs([Sample(torch.arange(8), torch.arange(8) > 3)])  # loads kernels and thread pools
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = of_status("VmRSS"), time.process_time()
    found = engine.logprobs(samples)
    seconds = time.process_time() - start
    return {
        "tokens": tokens,
        "budget": budget,
        "micro_batches": len(engine.plan(samples).micro_batches[0]),
        "peak_bytes": of_status("VmHWM") - before,
        "kept_bytes": sum(of_sample.numel() * of_sample.element_size() for of_sample in found),
        "mean_logprob": float(torch.cat(found).sum() / sum(int(sample.mask_T.sum()) for sample in samples)),
        "seconds": seconds,
    }


def in_a_process(*arguments: str | int) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps(arguments)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument(
        "--budget", type=int, default=8192, help="batch.max_tokens, and the tokens of the smallest batch"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(measure(*json.loads(args.child))))
        return

    versions = {"python": platform.python_version(), "torch": torch.__version__, "device": f"{platform.machine()} CPU"}
    print(f"{versions}; hidden {args.hidden}, {args.layers} layers, fp32, samples of {LENGTH} tokens")
    rows: dict[str, list[dict]] = {"budgeted": [], "all at once": []}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.hidden, args.layers)
        for factor in FACTORS:
            tokens = factor * args.budget
            for name, budget in (("budgeted", args.budget), ("all at once", tokens)):
                row = in_a_process(folder, tokens, budget)
                rows[name].append(row)
                print(
                    f"{factor} x {args.budget} tokens, {name:>11}: {row['micro_batches']} micro-batches, peak "
                    f"{row['peak_bytes'] / MIB:7.1f} MiB, {row['seconds']:.1f} s"
                )
    growth = {name: of_name[-1]["peak_bytes"] / of_name[0]["peak_bytes"] for name, of_name in rows.items()}
    more = rows["budgeted"][-1]["peak_bytes"] - rows["budgeted"][0]["peak_bytes"]
    per_token = more / (rows["budgeted"][-1]["tokens"] - rows["budgeted"][0]["tokens"])
    verdict = "constant" if growth["budgeted"] <= CLAIM else "NOT constant"
    print(
        f"{FACTORS[-1]} x the samples: {growth['budgeted']:.3f} x the peak ({verdict}; {per_token:.0f} bytes a token, "
        f"results among them), all at once {growth['all at once']:.2f} x"
    )
    if args.out:
        figures = {"versions": versions, "hidden": args.hidden, "layers": args.layers, "rows": rows, "growth": growth}
        args.out.write_text(json.dumps(figures | {"bytes_per_token": per_token}, indent=2) + "\n")


if __name__ == "__main__":
    main()
