"""What a training loop loses by its checkpoints: written while it goes on, against one that waits for them.

    python benchmarks/checkpoint_save.py [--out checkpoint_save.json] [--model 27m] [--every 4] [--saves 3] [--dir DIR]

The loop of a recipe on one CPU thread: `Engine.train_step` on the same samples, and a checkpoint (fp32 weights and both
moments, 12 bytes a parameter) after every so many steps, into DIR. Three loops of as many steps take turns: without
checkpoints, with those that are waited for, with asynchronous ones. The loss is how much longer a loop takes than that
without checkpoints, the wait for the last one left out: a run has that once.

A writer needs a core of its own to cost nothing; here it has the machine's second one.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from sft_step import M27, make_samples

from isoloss.engine.checkpoint_saver import Saver
from isoloss.engine.config import CheckpointConfig, Config, LossConfig
from isoloss.engine.config_tree import build
from isoloss.engine.engine import Engine
from isoloss.engine.garbage import Garbage
from isoloss.engine.losses import cross_entropy
from isoloss.models.weights.weight_map import num_parameters

M400 = M27 | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4,
              "intermediate_size": 3072}  # fmt: skip
MODELS = {"27m": (M27, 2), "400m": (M400, 1)}  # and sequences of a step
LOOPS = ("no checkpoints", "waited for", "asynchronous")


def run(engine: Engine, samples: list, folder: Path, loop: str, every: int, saves: int) -> tuple[float, list[float]]:
    """(seconds of the loop, those of each `Saver.save` in it)."""
    saver, loss, inside = Saver(CheckpointConfig(keep=1, asynchronous=loop == "asynchronous")), LossConfig(), []
    garbage = Garbage(100)
    garbage.begin()  # as the loop of a recipe: a save has Python look for garbage
    started = time.perf_counter()
    for step in range(1, every * saves + 1):
        engine.train_step(samples, cross_entropy(loss))
        if step % every == 0 and loop != LOOPS[0]:
            before = time.perf_counter()
            saver.save(partial(engine.stage, folder / f"step_{step:08d}", {"step": step}))
            inside.append(time.perf_counter() - before)
    seconds = time.perf_counter() - started
    garbage.end()
    saver.wait(last=True)
    saver.close()
    shutil.rmtree(folder, ignore_errors=True)
    return seconds, inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="checkpoint_save.json")
    parser.add_argument("--model", choices=MODELS, default="27m")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dir", default=None, help="where the checkpoints go; default: the folder for temporary files")
    arguments = parser.parse_args()

    spec, count = MODELS[arguments.model]
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(spec))
        keys = {"model": {"path": str(model), "from_scratch": True}, "memory": {"check": False}}
        engine = Engine(build(Config, keys))
        samples = make_samples(count, spec["vocab_size"], 0)
        parameters = num_parameters(engine.arch)
        engine.train_step(samples, cross_entropy(LossConfig()))
        took = {
            loop: run(engine, samples, Path(folder, "checkpoints"), loop, arguments.every, arguments.saves)
            for loop in LOOPS
        }
    plain = took[LOOPS[0]][0]
    lost = {loop: (took[loop][0] - plain) / arguments.saves for loop in LOOPS[1:]}
    found = {
        "parameters": parameters,
        "gigabytes": 12 * parameters / 1e9,
        "seconds_between_saves": plain / arguments.saves,
        "lost_seconds_per_save": lost,
        "seconds_in_save": {loop: took[loop][1] for loop in LOOPS[1:]},
        "share_of_the_loop": {loop: (took[loop][0] - plain) / took[loop][0] for loop in LOOPS[1:]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
    }
    Path(arguments.out).write_text(json.dumps(found, indent=2) + "\n")
    print(f"{parameters / 1e6:,.0f}M parameters, {found['gigabytes']:.2f} GB a checkpoint, "
          f"{found['seconds_between_saves']:.1f} s between them")  # fmt: skip
    for loop in LOOPS[1:]:
        share, inside = found["share_of_the_loop"][loop], found["seconds_in_save"][loop]
        first, last = inside[0], inside[-1]  # the first takes memory that the others find there
        print(f"{loop}: {lost[loop]:.2f} s lost a save ({first:.2f} s in the first, {last:.2f} s in the last), "
              f"{share:.1%} of the loop")  # fmt: skip
    print(f"ratio of what is lost, asynchronous to waited for: {lost['asynchronous'] / lost['waited for']:.2f}")


if __name__ == "__main__":
    main()
