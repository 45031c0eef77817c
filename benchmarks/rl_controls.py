"""Does the reward of `make grpo` rise because of the rewards? Three seeds, each with two controls beside it.

    python benchmarks/rl_controls.py [key=value ...] [--out FOLDER] [--seeds 0 1 2]

For every seed, the sft recipe (preset sort) makes a model from careless demonstrations, and from that model start

grpo: the grpo recipe (preset tiny; key=value overrides go to it).
sft continued: as many more steps on the same careless demonstrations, in another order, as took GRPO's training time,
    at a constant 0.3 of the recipe's peak learning rate. Time spent evaluating counts for neither.
shuffled: the grpo recipe, with the advantages of each generated batch dealt to its completions at random. No key of the
    configuration does that: this script replaces the estimator in isoloss.engine.rl.advantages while the recipe runs.

Every reward is that of the grpo recipe's evaluation: exact match on 512 held-out prompts, one completion each, sampled
at temperature 1 with the same random numbers (standard error about 0.02). One process, one rank. Writes
rl_controls.json and rl_controls.png. Exit status 1 unless, for every seed, GRPO starts at >= 0.15 and rises by >= 0.3,
and both controls rise by less than half of that.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.rl import advantages
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.report import completion_stats
from isoloss.engine.rl.setup import load_data, open_rewarder, open_rollout
from isoloss.engine.run.records import RunRecords
from isoloss.engine.step.engine import Engine
from isoloss.models.families.registry import read_architecture
from isoloss.recipes import launch

LEAST_START, LEAST_RISE, CONTROL_SHARE = 0.15, 0.3, 0.5
CONTINUED_LR = 0.3 * 2e-3  # of the peak in preset sort
EVALUATIONS = 5  # of the continued fine-tuning
# Evaluations of a run: seconds of training before each, and its reward.
Curve = list[tuple[float, float]]


def run(recipe: str, *overrides: str) -> None:
    if launch.main(recipe, overrides) != 0:
        sys.exit(1)


def seconds_of(folder: Path) -> list[float]:
    """Seconds of training before each number of optimizer steps, 0 among them."""
    return [0.0, *accumulate(row["seconds"] for row in RunRecords(folder).metrics())]


def train_grpo(start: Path, folder: Path, seed: int, overrides: Sequence[str]) -> Curve:
    common = (f"model.path={start}/hf", "preset=tiny", f"train.seed={seed}", f"output_dir={folder}")
    run("grpo", *common, *overrides)
    seconds = seconds_of(folder)
    return [(seconds[row["step"]], row["reward_mean"]) for row in RunRecords(folder).evaluations()]


def dealt_at_random(seed: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """GRPO's advantages, each given to another completion of the batch."""
    generator, grpo = torch.Generator().manual_seed(seed), advantages.grpo

    def estimator(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
        advantages_S = grpo(rewards_S, group_S, valid_S)
        return advantages_S[torch.randperm(len(advantages_S), generator=generator)]

    return estimator


def steps_between_evaluations(start: Path, seconds: float) -> int:
    """EVALUATIONS times as many steps take these seconds, at the pace of start's training."""
    times = seconds_of(start)
    return max(round(seconds / (times[-1] / (len(times) - 1)) / EVALUATIONS), 1)


def continue_sft(start: Path, folder: Path, seed: int, seconds: float, before: float) -> Curve:
    """before: the reward that it starts from."""
    every = steps_between_evaluations(start, seconds)
    of_run = (f"train.steps={every * EVALUATIONS}", f"checkpoint.every={every}", f"checkpoint.keep={EVALUATIONS}")
    model = (f"model.path={start}/hf", "model.from_scratch=false", f"output_dir={folder}")
    learning = (f"train.seed={seed + 1000}", f"optim.lr={CONTINUED_LR}", "optim.schedule=constant")
    run("sft", "preset=sort", *of_run, *model, *learning)
    spent = seconds_of(folder)
    steps = range(every, every * EVALUATIONS + 1, every)
    return [(0.0, before)] + [(spent[step], evaluate(folder / f"checkpoints/step_{step:08d}", seed)) for step in steps]


def evaluate(model: Path, seed: int) -> float:
    """The reward of a model in the evaluation of the grpo recipe."""
    overrides = [f"model.path={model}", "preset=tiny", f"train.seed={seed}"]
    config = launch.compose_config("grpo", RLConfig, overrides)[0]
    data = load_data(config, read_architecture(config.model.path))
    assert data.eval is not None, "the preset has data.eval"
    with open_rewarder(config, data) as rewarder:
        engine = Engine(config)
        with open_rollout(config, engine, data, rewarder, model) as rollout:
            rollout.sync_weights(0)
            found = completion_stats(rollout.evaluate(data.eval.prompts))
    dist.destroy_process_group()
    return found["reward_mean"]


def one_seed(folder: Path, seed: int, overrides: Sequence[str]) -> dict[str, Curve]:
    start = folder / f"sft-{seed}"
    run("sft", "preset=sort", f"train.seed={seed}", f"output_dir={start}")
    curves = {"grpo": train_grpo(start, folder / f"grpo-{seed}", seed, overrides)}
    seconds, before = curves["grpo"][-1][0], curves["grpo"][0][1]
    curves["sft continued"] = continue_sft(start, folder / f"continued-{seed}", seed, seconds, before)
    with mock.patch.object(advantages, "grpo", dealt_at_random(seed)):
        curves["shuffled"] = train_grpo(start, folder / f"shuffled-{seed}", seed, overrides)
    return curves


def verdict(curves: dict[str, Curve]) -> dict[str, object]:
    rises = {name: curve[-1][1] - curve[0][1] for name, curve in curves.items()}
    start, rise = curves["grpo"][0][1], rises["grpo"]
    controls = max(rises["sft continued"], rises["shuffled"])
    passed = start >= LEAST_START and rise >= LEAST_RISE and controls < CONTROL_SHARE * rise
    return {"start": start, "rises": rises, "passed": passed}


def table(verdicts: dict[int, dict]) -> str:
    lines = [
        "| seed | start | GRPO | SFT continued | shuffled advantages | largest control / GRPO | |",
        "|" + "---|" * 7,
    ]
    for seed, found in verdicts.items():
        start, rises = found["start"], found["rises"]
        ends = " | ".join(
            f"{start + rises[name]:.3f} ({rises[name]:+.3f})" for name in ("grpo", "sft continued", "shuffled")
        )
        controls = max(rises["sft continued"], rises["shuffled"])
        ratio = f"{controls / rises['grpo']:.2f}" if rises["grpo"] else "-"
        lines.append(f"| {seed} | {start:.3f} | {ends} | {ratio} | {'pass' if found['passed'] else 'FAIL'} |")
    return "\n".join(lines)


def draw(curves: dict[int, dict[str, Curve]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3.9), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for panel, (seed, arms) in zip(panels, curves.items()):
        for name, curve in arms.items():
            panel.plot(*zip(*curve), marker="o", markersize=3, label=name)
        panel.set_title(f"seed {seed}")
        panel.set_xlabel("seconds of training")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("reward on held-out prompts")
    panels[0].legend()
    figure.suptitle("GRPO on sorting letters, and two controls from the same fine-tuned model")
    figure.savefig(path, dpi=110)


def versions() -> dict[str, object]:
    packages = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
    return {"python": platform.python_version(), **packages, "threads": torch.get_num_threads()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new folder for runs and figures; default: a temporary one, told")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the grpo recipe, such as train.steps=40")
    args = parser.parse_args()
    if args.out is not None and args.out.exists():
        sys.exit(f"{args.out} exists already: choose another --out, or delete it")
    folder = args.out or Path(tempfile.mkdtemp(prefix="rl-controls-"))
    folder.mkdir(parents=True, exist_ok=True)
    curves = {seed: one_seed(folder, seed, args.overrides) for seed in args.seeds}
    verdicts = {seed: verdict(of_seed) for seed, of_seed in curves.items()}
    figures = {"versions": versions(), "load_average": os.getloadavg(), "overrides": args.overrides}
    (folder / "rl_controls.json").write_text(
        json.dumps({**figures, "verdicts": verdicts, "curves": curves}, indent=2) + "\n"
    )
    draw(curves, folder / "rl_controls.png")
    passed = all(found["passed"] for found in verdicts.values())
    print(table(verdicts))
    print(f"figures in {folder}/rl_controls.json and .png; {versions()}")
    print(
        f"{'passed' if passed else 'FAILED'}: on every seed GRPO has to start at >= {LEAST_START} and rise by >= "
        f"{LEAST_RISE}, and the controls by less than {CONTROL_SHARE} of its rise"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
