"""A training step of completions that share their prompts, against the same step with every sample whole.

    python benchmarks/shared_prefixes.py [--out shared_prefixes.json] [--passes 5] [--linear]

The model of `sft_step.py` (27.5M), or with --linear that of `linear_attention.py` (26M), fp32, one CPU thread: forward,
backward and AdamW of a step, all tokens of the completions labeled. One engine takes both steps in turn, with
`batch.share_prefixes` and without; the least CPU seconds of each count. The losses must agree to 1e-5, and the first
step of each is not timed. Beside the gain stands what the FLOPs promise: matrices of the layers and linear attention
once for each token that is computed, the output projection once for each label, attention once for each pair of tokens
that see each other.

The last row has nothing to share.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from linear_attention import MODEL as LINEAR
from sft_step import M27, make_samples

from isoloss.engine.batching.prefixes import fold
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.models.flops import output_parameters


@dataclass(frozen=True)
class Batch:
    """prompts x group completions; prompt, completion: their tokens, about."""

    prompts: int
    group: int
    prompt: int
    completion: int

    def samples(self, vocab_size: int) -> list[Sample]:
        if not self.prompt:
            return make_samples(16, vocab_size, 0)
        random, samples = np.random.default_rng(0), []
        for number in range(self.prompts):
            length = self.prompt + int(random.integers(-2, 3))
            prompt = random.integers(0, vocab_size, length)
            for _ in range(self.group):
                completion = random.integers(0, vocab_size, int(self.completion * random.uniform(0.5, 1.5)))
                tokens = torch.from_numpy(np.concatenate([prompt, completion]))
                samples.append(Sample(tokens, torch.arange(len(tokens)) >= length, number))
        return samples

    @property
    def name(self) -> str:
        if not self.prompt:
            return "16 sequences without a prompt in common"
        return f"{self.prompts} x {self.group}, {self.prompt} / {self.completion}"


BATCHES = [
    Batch(2, 8, 25, 32), Batch(4, 8, 25, 64), Batch(2, 8, 512, 32), Batch(2, 8, 512, 128), Batch(1, 8, 2048, 64),
    Batch(2, 8, 512, 512), Batch(1, 1, 0, 0),
]  # fmt: skip


def flops(engine: Engine, samples: list[Sample], shared: bool) -> float:
    """Of a forward."""
    pieces = fold([sample.tokens_T for sample in samples]).spans if shared else [(0, len(s)) for s in samples]
    output = 2 * output_parameters(engine.arch)
    labels = sum(int(sample.mask_T.sum()) for sample in samples)
    pairs = sum(stop**2 - start**2 for start, stop in pieces) * engine.cost_model.quadratic
    tokens = sum(stop - start for start, stop in pieces)
    return (engine.cost_model.linear - output) * tokens + output * labels + pairs


def measure(engine: Engine, batch: Batch, passes: int) -> dict[str, object]:
    samples, loss = batch.samples(engine.arch.vocab_size), cross_entropy(LossConfig())
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(passes + 1):
        found = {}
        for shared in (False, True):
            engine.config = replace(engine.config, batch=replace(engine.config.batch, share_prefixes=shared))
            started = time.process_time()
            # Without a learning rate the weights stay: both sides compute the same step each time.
            metrics, _ = engine.train_step(samples, loss, lr=0.0)
            seconds[shared].append(time.process_time() - started)
            found[shared] = metrics
        assert abs(found[True].loss / found[False].loss - 1) < 1e-5, found
        if turn == 0:
            seconds = {False: [], True: []}
    whole, shared = (min(seconds[kind]) for kind in (False, True))
    gain, promised = whole / shared, flops(engine, samples, False) / flops(engine, samples, True)
    tokens = [found[kind].computed_tokens for kind in (False, True)]
    told = f"{batch.name}: {tokens[0]:,} tokens, {tokens[1]:,} computed; {whole:.2f} -> {shared:.2f} CPU s, "
    print(f"{told}{gain:.2f} times as fast; the FLOPs promise {promised:.2f} ({gain / promised:.0%})", flush=True)
    return {"batch": batch.name, "tokens": tokens, "cpu_seconds": [whole, shared], "gain": gain, "flops": promised}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="shared_prefixes.json")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--linear", action="store_true", help="three of four layers of linear attention")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LINEAR if arguments.linear else M27))
        keys = {"model": {"path": folder, "from_scratch": True}, "batch": {"max_tokens": arguments.max_tokens}}
        engine = Engine(build(Config, {**keys, "memory": {"check": False}}))
        rows = [measure(engine, batch, arguments.passes) for batch in BATCHES]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "load": os.getloadavg()[0]}
    Path(arguments.out).write_text(json.dumps({"rows": rows, "versions": versions}, indent=2) + "\n")


if __name__ == "__main__":
    main()
