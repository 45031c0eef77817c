"""Completions of a batch: what rank 0 holds of them, and what their way to another rank takes on top.

    python benchmarks/rollout_memory.py [--out rollout_memory.json] [--completions 512] [--tokens 8192]

A server's answer is JSON: lists of Python's own numbers. Beside what `Completion` makes of them stands a completion
that keeps tuples of them. Either form is built, one answer after the other, pickled and read back, in a process of its
own: the figures are its resident set less that before, and the largest (VmHWM).
"""

import argparse
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from logprob_memory import MIB, of_status

from isoloss.engine.rl.trajectory import Completion

FORMS = ("tuples", "arrays")


@dataclass(frozen=True)
class OfTuples:
    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def answer(random: np.random.Generator, tokens: int) -> tuple[list[int], list[float], list[int]]:
    """As it comes out of JSON: every number an object of its own."""
    ids, logprobs = random.integers(1000, 100_000, tokens), -random.random(tokens)
    text = json.dumps([ids.tolist(), logprobs.tolist(), [1000] * tokens])
    found = json.loads(text)
    return found[0], found[1], found[2]


def measure(form: str, completions: int, tokens: int) -> dict[str, float]:
    """MiB held, and MiB at most while the completions travel."""
    random = np.random.default_rng(0)
    answer(random, tokens)
    before = of_status("VmRSS")
    held = []
    for index in range(completions):
        ids, logprobs, versions = answer(random, tokens)
        if form == "tuples":
            held.append(OfTuples(str(index), tuple(ids), tuple(logprobs), tuple(versions)))
        else:
            held.append(Completion(str(index), ids, logprobs, versions, "length"))
    after = of_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    arrived = pickle.loads(pickle.dumps(held))
    assert len(arrived) == completions
    return {"held": (after - before) / MIB, "peak": (of_status("VmHWM") - before) / MIB}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="rollout_memory.json")
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = ["--completions", str(options.completions), "--tokens", str(options.tokens)]
    if options.form:
        print(json.dumps(measure(options.form, options.completions, options.tokens)))
        return
    rows = {}
    for form in FORMS:
        command = [sys.executable, __file__, *size, "--form", form]
        rows[form] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        held, peak = rows[form]["held"], rows[form]["peak"]
        each = held * MIB / (options.completions * options.tokens)
        print(f"{form:8} {held:8.0f} MiB held ({each:.0f} bytes a token), {peak:8.0f} MiB at most on the way")
    print(f"held: {rows['tuples']['held'] / rows['arrays']['held']:.1f} times less in arrays")
    Path(options.out).write_text(json.dumps({"completions": options.completions, "tokens": options.tokens, **rows}))


if __name__ == "__main__":
    main()
