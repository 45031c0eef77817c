"""How much faster do all cores tokenize rows than one, and how long is the screen of a run empty?

    python benchmarks/tokenizing.py [--rows 30000] [--out tokenizing.json]

Rows of about 120 bytes with the tokenizer that tools/dev/make_tiny.py made, two forms in turn. Prints seconds of both,
their ratio, the time to the first byte of `python -m isoloss.recipes.sft` on these rows without a cache, and the load
of the machine before. The arrays of both must be equal.
"""

import argparse
import json
import os
import pty
import random
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from unittest import mock

import numpy as np

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data import tokenizing
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.data.token_dataset import ARRAYS, TokenDataset
from isoloss.engine.data.token_processes import cores

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
WORDS = ("the", "value", "of", "an", "object", "is", "returned", "if", "no", "name", "was", "given", "holds", "more")


def write_rows(path: Path, rows: int) -> None:
    chance = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            asked, answered = (" ".join(chance.choices(WORDS, k=7)) for _ in range(2))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            row = {"messages": turns} if number % 2 else {"prompt": asked, "completion": f" {answered} {answered}"}
            file.write(json.dumps(row) + "\n")


def timed(rows: Path, cache: Path, processes: int) -> tuple[float, TokenDataset]:
    """Return the seconds of tokenizing without a cache, and the rows."""
    started = time.perf_counter()
    with mock.patch.object(tokenizing, "cores", lambda: processes):
        dataset = load_dataset(
            DataConfig(train=(str(rows),)), "train", TINY, vocab_size=2048, cache_dir=cache / str(processes)
        )
    return time.perf_counter() - started, dataset


def first_byte(rows: Path, folder: Path) -> float:
    """Return the seconds from the start of a run to the first byte that it prints on a terminal."""
    command = [sys.executable, "-m", "isoloss.recipes.sft", f"model.path={TINY}", "model.from_scratch=true"]
    command += [f"data.train={rows}", "train.steps=1", f"output_dir={folder}/run"]
    started = time.perf_counter()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as run:
        os.read(ours, 1)
        seconds = time.perf_counter() - started
        run.kill()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--out", type=Path, default=Path("tokenizing.json"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, options.rows)
        size = rows.stat().st_size
        byte = first_byte(rows, Path(folder))
        one, of_one = timed(rows, Path(folder), 1)
        several, of_several = timed(rows, Path(folder), cores())
        for name in ARRAYS:
            assert np.array_equal(getattr(of_one, name), getattr(of_several, name)), name
        tokens = of_one.stats.tokens
    result = {
        "rows": options.rows, "bytes": size, "tokens": tokens, "cores": cores(), "load": load,
        "seconds_one": one, "seconds_all": several, "ratio": one / several, "first_byte_seconds": byte,
    }  # fmt: skip
    print(f"{options.rows:,} rows, {size / 1e6:.1f} MB, {tokens:,} tokens; load of the machine before: {load:.1f}")
    print(f"one core {one:.1f} s, {cores()} cores {several:.1f} s: {one / several:.2f} times as fast")
    print(f"first byte of a run after {byte:.1f} s")
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
