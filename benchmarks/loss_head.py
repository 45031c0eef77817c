"""The loss head: peak memory of forward and backward for a long micro-batch and a large vocabulary, and its speed.

    python benchmarks/loss_head.py [--out loss_head.json] [--tokens 32768] [--vocab 151936] [--hidden 256]

Memory: hidden states, output matrix and targets exist; what do log-probabilities at the labeled positions and the
gradients of both inputs take on top? The gradients themselves are counted. It stands beside the fp32 logits of every
position of the micro-batch, which a plain head holds in its forward alone (its backward holds at least as much again).
On a CPU each row runs in a process of its own: the peak is the process's largest resident set (ru_maxrss) in the end,
less its resident set before the forward; had anything before been larger, this would report too much, never too little.
On a GPU it is torch.cuda.max_memory_allocated, less what was allocated before.

Speed: forward and backward against torch's linear and cross_entropy at --dense-tokens positions, all labeled, where
the dense logits fit. They take turns; the least seconds of --passes count (CPU seconds of one thread; on a GPU wall
time).
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from isoloss.parallel.loss_head import CHUNK_ELEMENTS, vocab_parallel_logprobs
from isoloss.parallel.runtime import process_group

MIB = 1 << 20
CLAIM = 0.25  # of full fp32 logits


def make_inputs(tokens: int, vocab: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states [tokens, hidden], output matrix [vocab, hidden], targets [tokens]."""
    device = torch.device(torch.cuda.current_device())
    torch.manual_seed(0)
    hidden_TD = torch.randn(tokens, hidden, device=device).requires_grad_()
    weight_VD = (torch.randn(vocab, hidden, device=device) * hidden**-0.5).requires_grad_()
    return hidden_TD, weight_VD, torch.randint(0, vocab, (tokens,), device=device)


def labelled_loss(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, labelled_N: Tensor) -> Tensor:
    """As `isoloss.models.model.Model.logprobs` does it on one rank."""
    assert dist.group.WORLD is not None
    logprobs_N, _ = vocab_parallel_logprobs(
        hidden_TD[labelled_N], weight_VD, targets_T[labelled_N], weight_VD.shape[0], dist.group.WORLD
    )
    return -logprobs_N.sum() / labelled_N.numel()


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clock() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_memory(tokens: int, vocab: int, hidden: int, fraction: float) -> dict:
    """Bytes on top of the inputs, at the end of the forward and of the backward; in a fresh process."""
    hidden_TD, weight_VD, targets_T = make_inputs(tokens, vocab, hidden)
    labelled_N = torch.arange(0, tokens, round(1 / fraction), device=hidden_TD.device)
    # Kernels and thread pools are loaded by a first small call: they are no part of the head's memory.
    labelled_loss(hidden_TD[:8].detach().requires_grad_(), weight_VD[:8].detach().requires_grad_(),
                  targets_T[:8] % 8, labelled_N[:1]).backward()  # fmt: skip
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident()
    start = clock()
    loss = labelled_loss(hidden_TD, weight_VD, targets_T, labelled_N)
    forward = peak() - before
    loss.backward()
    return {"labeled": labelled_N.numel(), "loss": loss.item(), "forward_bytes": forward,
            "peak_bytes": peak() - before, "seconds": clock() - start}  # fmt: skip


def measure_speed(tokens: int, vocab: int, hidden: int, passes: int) -> dict:
    """Seconds of forward and backward, ours and dense; their losses and gradients must agree first."""
    hidden_TD, weight_VD, targets_T = make_inputs(tokens, vocab, hidden)
    every_N = torch.arange(tokens, device=hidden_TD.device)
    heads = {
        "isoloss": lambda: labelled_loss(hidden_TD, weight_VD, targets_T, every_N),
        "dense": lambda: cross_entropy(linear(hidden_TD, weight_VD), targets_T),
    }

    def run(head) -> tuple[float, Tensor, Tensor, Tensor]:
        hidden_TD.grad = weight_VD.grad = None
        start = clock()
        loss = head()
        loss.backward()
        assert hidden_TD.grad is not None and weight_VD.grad is not None
        return clock() - start, loss.detach(), hidden_TD.grad, weight_VD.grad

    for ours, dense in zip(run(heads["isoloss"])[1:], run(heads["dense"])[1:]):
        error = ((ours - dense).norm() / dense.norm()).item()
        if not error < 1e-5:
            sys.exit(f"the two heads disagree by {error:.1e}: no ratio is printed")
    seconds: dict[str, list[float]] = {name: [] for name in heads}
    for _ in range(passes):
        for name, head in heads.items():
            seconds[name].append(run(head)[0])
    best = {name: min(s) for name, s in seconds.items()}
    return {"tokens": tokens, "seconds": seconds, "least": best, "speed_over_dense": best["dense"] / best["isoloss"]}


def in_a_process(name: str, *numbers: float) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps([name, *numbers])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--tokens", type=int, default=32768, help="of the micro-batch")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dense-tokens", type=int, default=1024, help="positions of the comparison of speed")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        name, *numbers = json.loads(args.child)
        process_group.init_process_group()
        print(json.dumps({"memory": measure_memory, "speed": measure_speed}[name](*numbers)))
        return

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU, one thread"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "device": device}
    print(f"{versions}; hidden {args.hidden}, vocabulary {args.vocab}, fp32, chunks of {CHUNK_ELEMENTS} logits")
    full = args.tokens * args.vocab * 4
    print(f"{args.tokens} tokens: full fp32 logits, forward alone {full / MIB:9.0f} MiB")
    rows = []
    for fraction in (1.0, 0.25):
        row = in_a_process("memory", args.tokens, args.vocab, args.hidden, fraction)
        row |= {"fraction": fraction, "full_logits_bytes": full, "peak_over_full_logits": row["peak_bytes"] / full}
        rows.append(row)
        print(
            f"{row['labeled']:>9} labeled: forward {row['forward_bytes'] / MIB:6.0f} MiB, with backward "
            f"{row['peak_bytes'] / MIB:6.0f} MiB = {row['peak_over_full_logits']:.4f} of full logits "
            f"({'less' if row['peak_over_full_logits'] < CLAIM else 'NOT less'} than {CLAIM}), {row['seconds']:.1f} s"
        )
    speed = in_a_process("speed", args.dense_tokens, args.vocab, args.hidden, args.passes)
    least = speed["least"]
    print(
        f"{args.dense_tokens} tokens, all labeled, forward and backward: isoloss {least['isoloss']:.3f} s, dense "
        f"{least['dense']:.3f} s: {speed['speed_over_dense']:.2f} x the speed of dense"
    )
    if args.out:
        sizes = {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden}
        args.out.write_text(
            json.dumps({"versions": versions, **sizes, "memory": rows, "speed": speed}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
