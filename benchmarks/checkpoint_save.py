"""What a training loop loses by its checkpoints: written while it goes on, against one that waits for them.

    python benchmarks/checkpoint_save.py [--out FILE] [--model 27m] [--every 4] [--rounds 20] [--dir DIR]

The loop of a recipe on one CPU thread: `Engine.train_step` on the same samples. Three kinds of it take turns, so many
steps each: without a checkpoint; after one (fp32 weights and both moments, 12 bytes a parameter, into DIR) that is
waited for; after an asynchronous one, which is on the disk when the turn ends. What a checkpoint loses is how much
longer than those without one in the same round its steps took, with the save: the median of all rounds but the first,
in which memory for the copy is new.

A writer needs a core of its own to cost nothing; here it has the machine's second one.

glibc is told to keep what is freed. Otherwise it is luck whether it gives a step's memory back, and the next step,
which clears the pages anew, takes up to 12 % longer: more than any checkpoint.
"""

import argparse
import ctypes
import json
import os
import platform
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles

import torch
from sft_step import M27, make_samples

from isoloss.engine.checkpoint.saver import Saver
from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import CheckpointConfig, Config, LossConfig
from isoloss.engine.instruments.startup import Garbage
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.models.weights.weight_map import num_parameters

M400 = M27 | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4,
              "intermediate_size": 3072}  # fmt: skip
MODELS = {"27m": (M27, 2), "400m": (M400, 1)}  # and sequences of a step
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
LOOPS = ("no checkpoints", "waited for", "asynchronous")


def keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0)):
        if not libc.mallopt(parameter, value):
            raise RuntimeError(f"mallopt({parameter}, {value}) failed")


class Turns:
    """savers: of the loops that write checkpoints. seconds: of every turn, by loop; inside: those of `Saver.save`."""

    def __init__(self, engine: Engine, samples: list, folder: Path, every: int):
        self._engine, self._samples, self._folder, self._every, self._step = engine, samples, folder, every, 0
        self._loss = cross_entropy(LossConfig())
        self._savers = {loop: Saver(CheckpointConfig(keep=1, asynchronous=loop == LOOPS[2])) for loop in LOOPS[1:]}
        self.seconds: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        self.inside: dict[str, list[float]] = {loop: [] for loop in LOOPS[1:]}

    def take(self, loop: str) -> None:
        started = time.perf_counter()
        if loop in self._savers:
            folder = self._folder / loop / f"step_{self._step:08d}"
            self._savers[loop].save(partial(self._engine.stage, folder, {"step": self._step}))
            self.inside[loop].append(time.perf_counter() - started)
        for _ in range(self._every):
            self._engine.train_step(self._samples, self._loss)
        if loop in self._savers:
            self._savers[loop].wait(last=True)
        self.seconds[loop].append(time.perf_counter() - started)
        self._step += self._every

    def close(self) -> None:
        for saver in self._savers.values():
            saver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="checkpoint_save.json")
    parser.add_argument("--model", choices=MODELS, default="27m")
    parser.add_argument("--every", type=int, default=4, help="steps of a turn; longer than it takes to write")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dir", default=None, help="where the checkpoints go; default: the folder for temporary files")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    keep_freed_memory()
    spec, count = MODELS[arguments.model]
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(spec))
        keys = {"model": {"path": str(model), "from_scratch": True}, "memory": {"check": False}}
        engine = Engine(build(Config, keys))
        parameters = num_parameters(engine.arch)
        turns = Turns(engine, make_samples(count, spec["vocab_size"], 0), Path(folder), arguments.every)
        turns.take(LOOPS[0])  # loads kernels
        turns.seconds[LOOPS[0]].clear()
        garbage = Garbage(100)
        garbage.begin()  # as the loop of a recipe: a save has Python look for garbage
        for _, loop in product(range(arguments.rounds), LOOPS):
            turns.take(loop)
        garbage.end()
        turns.close()
    plain = turns.seconds[LOOPS[0]]
    lost = {
        loop: [took - without for took, without in zip(turns.seconds[loop], plain, strict=True)] for loop in LOOPS[1:]
    }
    waited, asynchronous = (median(lost[loop][1:]) for loop in LOOPS[1:])
    found = {
        "parameters": parameters,
        "gigabytes": 12 * parameters / 1e9,
        "seconds": turns.seconds,
        "seconds_in_save": turns.inside,
        "lost_seconds": lost,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
    }
    Path(arguments.out).write_text(json.dumps(found, indent=2) + "\n")
    print(f"{parameters / 1e6:,.0f}M parameters, {found['gigabytes']:.2f} GB a checkpoint, "
          f"{median(plain) / arguments.every:.2f} s a step")  # fmt: skip
    for loop in LOOPS[1:]:
        inside, (first, *others) = turns.inside[loop], lost[loop]
        low, middle, high = quantiles(others, n=4)
        print(f"{loop}: {middle:.2f} s lost a save ({low:.2f} to {high:.2f} in half of the rounds, {first:.2f} in the "
              f"first), {median(inside[1:]):.2f} s of it in the save ({inside[0]:.2f} in the first)")  # fmt: skip
    for share in (0.1, 0.2):
        between = waited / share  # seconds from one save to the next, with what is lost
        print(f"where the one that is waited for takes {share:.0%} of the loop, the asynchronous takes "
              f"{asynchronous / (between - waited + asynchronous):.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
