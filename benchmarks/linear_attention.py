"""Forward and backward of a model with layers of Gated DeltaNet on one CPU thread: speed and memory.

    python benchmarks/linear_attention.py [--out linear_attention.json] [--passes 3] [--max-tokens 4096]

The model has the shape of Qwen3.5: 26M parameters, random weights, fp32; three of four layers are linear.

Speed: `Engine.forward_backward` on packed rows of one rank, against transformers' Qwen3_5ForCausalLM on its torch path,
one document at a time: its CPU path lets states cross the documents of a packed row. It computes logits at every token,
isoloss at labeled ones, so there is a row with all tokens labeled. Both start from the same weights. The first step
of each is not timed: there the losses must agree to 1e-6 and the gradient norms to 1e-5, or no ratio is printed. Then
they take turns, and the least CPU seconds (of the process, all threads) of each count. No optimizer steps.

Memory: the peak of `Engine.forward_backward` above the idle engine, on one row of 8,192 tokens, against the same sizes
with full attention in every layer. A process for each, as in logprob_memory.py, which says how it is measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from logprob_memory import MIB, of_status
from sft_step import LOSS_TOLERANCE, NORM_TOLERANCE, make_samples, versions
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy

MODEL = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 384,
         "num_hidden_layers": 8, "full_attention_interval": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
         "head_dim": 64, "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "intermediate_size": 1280, "vocab_size": 16384,
         "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "hidden_act": "silu",
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}  # fmt: skip
SPEED, MEMORY = 2.0, 2.0  # the goals: at least this much faster, at most this much more
ROW = 8192  # tokens of a row whose memory is measured
ATTENTION = {"linear": 4, "full": 1}  # full_attention_interval


def labeled(lengths: Sequence[int], vocab_size: int, first: float) -> list[Sample]:
    """Random tokens, labeled from this share of each document on. A first token is never labeled."""
    random = torch.Generator().manual_seed(0)
    return [
        Sample(torch.randint(vocab_size, (n,), generator=random), torch.arange(n) >= max(1, int(first * n)))
        for n in lengths
    ]


def workloads(sequences: int, long: Sequence[int]) -> dict[str, list[Sample]]:
    vocab = MODEL["vocab_size"]
    mixed = make_samples(sequences, vocab, seed=0)
    return {
        "log-normal": mixed,
        "log-normal, all labeled": labeled([len(s) for s in mixed], vocab, 0),
        "long": labeled(long, vocab, 0.5),
    }


def make_engine(folder: str, max_tokens: int) -> Engine:
    settings = {
        "model": {"path": folder, "from_scratch": True},
        "batch": {"max_tokens": max_tokens},
        "train": {"precision": "fp32"},
        "parallel": {"distributed_optimizer": False},  # `Engine.gradients` asks for it
    }
    return Engine(build(Config, settings))


class Isoloss:
    def __init__(self, engine: Engine):
        self.engine, self.loss = engine, cross_entropy(LossConfig())

    def weights(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t, _ in self.engine.model.hf_tensors(torch.float32)}

    def forward_backward(self, samples: list[Sample]) -> float:
        return self.engine.forward_backward(samples, self.loss).loss

    def norm(self) -> float:
        return norm_of(gradient for _, gradient in self.engine.gradients())

    def zero_grad(self) -> None:
        self.engine.zero_grad()


class Transformers:
    """One document at a time."""

    def __init__(self, weights: dict[str, Tensor]):
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        names = {k: v for k, v in MODEL.items() if k != "architectures"}
        config = Qwen3_5TextConfig(**names, attn_implementation="sdpa")  # pyright: ignore[reportCallIssue]
        self.model = Qwen3_5ForCausalLM(config)
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert missing == ["lm_head.weight"] and not unknown, (missing, unknown)
        self.model.train()

    def forward_backward(self, samples: list[Sample]) -> float:
        labels, total = sum(int(s.mask_T.sum()) for s in samples), 0.0
        for sample in samples:
            loss = self.model(
                input_ids=sample.tokens_T[None],
                labels=sample.tokens_T.masked_fill(~sample.mask_T, -100)[None],
                num_items_in_batch=labels,
                use_cache=False,
            ).loss
            loss.backward()
            total += loss.item()
        return total

    def norm(self) -> float:
        return norm_of(p.grad for p in self.model.parameters() if p.grad is not None)

    def zero_grad(self) -> None:
        self.model.zero_grad()


def norm_of(gradients) -> float:
    return sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in gradients) ** 0.5


def compare(ours: Isoloss, theirs: Transformers, samples: list[Sample], passes: int) -> dict:
    """CPU seconds of both. Raises SystemExit where they do not compute the same."""
    loops, found, seconds = {"isoloss": ours, "transformers": theirs}, {}, {"isoloss": [], "transformers": []}
    for name, loop in loops.items():
        found[name] = loop.forward_backward(samples), loop.norm()
        loop.zero_grad()
    off = [abs(mine / other - 1) for mine, other in zip(found["isoloss"], found["transformers"], strict=True)]
    if not (off[0] <= LOSS_TOLERANCE and off[1] <= NORM_TOLERANCE):
        sys.exit(f"losses are off by {off[0]:.1e}, gradient norms by {off[1]:.1e}: no ratio is printed")
    for _ in range(passes):
        for name, loop in loops.items():
            start = time.process_time()
            loop.forward_backward(samples)
            seconds[name].append(time.process_time() - start)
            loop.zero_grad()
    tokens, best = sum(map(len, samples)), {name: min(times) for name, times in seconds.items()}
    return {
        "documents": len(samples), "tokens": tokens, "labels": sum(int(s.mask_T.sum()) for s in samples),
        "off": off, "cpu_seconds": seconds,
        "tokens_per_second": {name: tokens / least for name, least in best.items()},
        "speed": best["transformers"] / best["isoloss"],
    }  # fmt: skip


def measure_memory(folder: str, tokens: int) -> int:
    """Bytes above the idle engine, of one document of so many tokens, half of them labeled. In a fresh process."""
    ours = Isoloss(make_engine(folder, tokens))
    vocab = ours.engine.arch.vocab_size
    ours.forward_backward(labeled([64], vocab, 0.5))  # loads kernels
    ours.zero_grad()
    samples = labeled([tokens], vocab, 0.5)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = of_status("VmRSS")
    ours.forward_backward(samples)
    return of_status("VmHWM") - before


def in_a_process(folder: str, tokens: int) -> int:
    command = [sys.executable, "-W", "ignore", __file__, "--child", folder, "--row", str(tokens)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return int(done.stdout.splitlines()[-1])


def write_model(folder: Path, interval: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL | {"full_attention_interval": interval}))
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--passes", type=int, default=3, help="timed passes of each; the least counts")
    parser.add_argument("--sequences", type=int, default=16, help="documents of the log-normal workloads")
    parser.add_argument("--long", type=int, nargs="+", default=[4096], help="lengths of the long documents")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a micro-batch of isoloss")
    parser.add_argument("--row", type=int, default=ROW, help="tokens of the row whose memory is measured")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("this benchmark is about one CPU thread: run it with CUDA_VISIBLE_DEVICES= (empty)")
    torch.set_num_threads(1)
    if args.child:
        print(measure_memory(args.child, args.row))
        return

    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: write_model(Path(temporary) / name, each) for name, each in ATTENTION.items()}
        memory = {name: in_a_process(folder, args.row) for name, folder in folders.items()}
        ratio = memory["linear"] / memory["full"]
        peaks = ", ".join(f"{name} {peak / MIB:.0f} MiB" for name, peak in memory.items())
        print(f"{args.row} tokens, peak: {peaks}; {ratio:.2f} x full attention (goal {MEMORY})")

        ours = Isoloss(make_engine(folders["linear"], args.max_tokens))
        theirs = Transformers(ours.weights())
        parameters = sum(p.numel() for p in theirs.model.parameters())
        print(f"{parameters / 1e6:.1f}M parameters; {versions()}")
        for name, samples in workloads(args.sequences, args.long).items():
            rows[name] = row = compare(ours, theirs, samples, args.passes)
            speeds = ", ".join(f"{who} {speed:.0f}" for who, speed in row["tokens_per_second"].items())
            counts = f"{row['documents']} documents, {row['tokens']} tokens, {row['labels']} labels"
            print(
                f"{name:<25}{counts}; tokens/CPU-s: {speeds}; speed {row['speed']:.2f} x transformers (goal {SPEED}); "
                f"loss off {row['off'][0]:.1e}, gradient norm off {row['off'][1]:.1e}"
            )
    if args.out:
        figures = {"versions": versions(), "load_average": os.getloadavg(), "model": MODEL, "parameters": parameters,
                   "rows": rows, "peak_bytes": memory, "memory_over_full": ratio}  # fmt: skip
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
