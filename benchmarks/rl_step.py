"""A whole GRPO step of isoloss on one CPU thread, against TRL's GRPOTrainer: generate, log-probabilities, train.

    python benchmarks/rl_step.py [--out rl_step.json] [--picture rl_step.png] [--passes 3] [--rows 0 2] [--profile DIR]
    python benchmarks/rl_step.py --tune 2 4 8 [--rows 0]      TRL alone, with other batch sizes and caches

The model of `sft_step.py` (27.5M), fp32; AdamW, clipping at 1; GRPO with one optimizer step for each generated batch,
temperature 1 and no KL term, so neither side needs a pass for old log-probabilities. The prompts of a batch are equally
long, which spares TRL the padding. No completion ends early: the token that would end it is not one of the model's.

trl: GRPOTrainer with transformers' generate, without gradient checkpointing, with the batch size that `--tune` found
    best for the row. It lives in an environment of its own (`make bench-rl`); without one isoloss is measured alone.
isoloss transformers, isoloss megatron: the pieces of `isoloss.engine.rl.loop`, with `batch.share_prefixes=true`, and
    rollout.backend as it is called.

Each side is a process. All start from the same weights and read the same file of prompts with the same reward function.
The first step of each is not timed: on the completions of TRL's, isoloss's gradient norm must agree with TRL's to 1e-4,
or no ratio is printed. Then they take turns, and the least CPU seconds of each count, of the process and of those that
it started. Memory is the largest resident set of the process, above what it had once model and optimizer were there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sft_step import M27

HERE = Path(__file__).parent
TRL_PYTHON = HERE.parent / ".trl-venv" / "bin" / "python"
BACKENDS = ("transformers", "megatron")
PHASES = ("sync", "generate", "logprobs", "train", "rest")
NORM_TOLERANCE = 1e-4
LR, BETAS, EPS, CLIP, SEED = 1e-5, (0.9, 0.95), 1e-8, 1.0, 0


@dataclass(frozen=True)
class Row:
    """prompts x group completions; prompt, completion: their tokens. target: the ratio to reach. trl_batch:
    per_device_train_batch_size of TRL, the best that --tune found."""

    prompts: int
    group: int
    prompt: int
    completion: int
    target: float
    trl_batch: int

    @property
    def name(self) -> str:
        return f"{self.prompts}x{self.group} {self.prompt}/{self.completion}"

    @property
    def sequences(self) -> int:
        return self.prompts * self.group


ROWS = [
    Row(2, 8, 25, 32, 0.45, 4), Row(4, 8, 25, 64, 0.45, 4), Row(2, 8, 512, 32, 0.2, 2),
    Row(2, 8, 512, 128, 0.25, 2), Row(1, 8, 2048, 64, 0.15, 1),
]  # fmt: skip


class Side:
    """A process that takes a step when it is told to."""

    def __init__(self, name: str, python: Path | str, job: dict[str, Any], folder: Path):
        path = folder / f"{name.replace(' ', '-')}.json"
        path.write_text(json.dumps(job))
        self.name, self.turns = name, []
        script = HERE / "rl_sides" / f"{name.split()[0]}_side.py"
        offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        self._process = subprocess.Popen(
            [python, script, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **offline},
        )

    def __enter__(self) -> "Side":
        self.start = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its stdin, which ends it

    def turn(self, do: str = "step", **order: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def step(self, row: Row) -> dict[str, Any]:
        found = self.turn()
        wanted = row.sequences * row.completion
        if found["completion_tokens"] != wanted:
            sys.exit(f"{self.name} generated {found['completion_tokens']} tokens instead of {wanted}")
        if not np.isfinite(found["loss"]):
            sys.exit(f"{self.name}: the loss is {found['loss']}")
        return found

    def timed(self, row: Row) -> None:
        self.turns.append(self.step(row))

    def figures(self) -> dict[str, Any]:
        best = min(self.turns, key=lambda turn: turn["total"])
        return {
            "cpu_seconds": [turn["total"] for turn in self.turns],
            "least": best["total"],
            "phases": best["phases"],
            "imported_mib": self.start["imported_mib"],
            "loaded_mib": self.start["loaded_mib"],
            "peak_mib": max(turn["peak_mib"] for turn in self.turns),
        }

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with status {self._process.wait()}; the reason is above")
        return json.loads(line)


def write_model(folder: Path) -> None:
    """M27 with random weights, and a tokenizer that has a word for each token: a prompt's length can be chosen."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    names = {k: v for k, v in M27.items() if k != "architectures"}
    Qwen3ForCausalLM(Qwen3Config(**names)).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(M27["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0").save_pretrained(folder)


def write_prompts(path: Path, row: Row, steps: int) -> None:
    random = np.random.default_rng(SEED)
    tokens = random.integers(1, M27["vocab_size"], (row.prompts * steps, row.prompt)).tolist()
    lines = [json.dumps({"prompt": " ".join(f"w{token}" for token in prompt)}) for prompt in tokens]
    path.write_text("\n".join(lines) + "\n")


def job_of(row: Row, folder: Path, max_tokens: int) -> dict[str, Any]:
    return {
        "row": asdict(row), "folder": str(folder), "model": str(folder / "model"),
        "data": str(folder / "prompts.jsonl"), "never": M27["vocab_size"], "max_tokens": max_tokens, "trl_cache": None,
        "lr": LR, "betas": BETAS, "eps": EPS, "clip": CLIP, "seed": SEED,
    }  # fmt: skip


def measure(row: Row, args: argparse.Namespace, with_trl: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_model(folder / "model")
        write_prompts(folder / "prompts.jsonl", row, args.passes + 4)
        job = job_of(row, folder, args.max_tokens)
        sides = []
        if with_trl:
            sides.append(stack.enter_context(Side("trl", args.trl, job, folder)))
        for backend in args.backends:
            side = Side(f"isoloss {backend}", sys.executable, job | {"backend": backend}, folder)
            sides.append(stack.enter_context(side))
        first = {}
        for side in sides:
            if side.name != "trl" and with_trl:
                first[side.name] = side.turn("compare", path=str(folder / "trl_first.json"))
            found = side.step(row)
            first.setdefault(side.name, found)
        off = disagreement(first) if with_trl else {}
        for _ in range(args.passes):
            for side in sides:
                side.timed(row)
        figures = {side.name: side.figures() for side in sides}
        for side in sides:
            if side.name != "trl" and args.profile:
                name = f"{row.name}-{side.name}".replace(" ", "-").replace("/", "-")
                side.turn("profile", folder=str(args.profile.absolute()), name=name)
        versions = {side.name.split()[0]: side.start["versions"] for side in sides}
    return {"row": asdict(row), "sides": figures, "gradient_norm_off": off, "versions": versions}


def disagreement(first: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How far each side's gradient norm is from TRL's, of the same completions. The losses are all 0, for the
    advantages of a group add up to 0."""
    off = {name: found["grad_norm"] / first["trl"]["grad_norm"] - 1 for name, found in first.items() if name != "trl"}
    for name, relative in off.items():
        loss = first[name]["loss"], first["trl"]["loss"]
        if not (abs(relative) <= NORM_TOLERANCE and abs(loss[0] - loss[1]) <= NORM_TOLERANCE):
            sys.exit(f"{name} and trl do not compute the same step: {first}")
    return off


def report(found: dict[str, Any], row: Row) -> None:
    off = "".join(f"; gradient norm off by {abs(value):.1e}" for value in found["gradient_norm_off"].values())
    print(f"{row.name}{off}")
    for name, side in found["sides"].items():
        trl = found["sides"].get("trl")
        ratio = "" if trl is None or name == "trl" else f"  {side['least'] / trl['least']:.2f} (target {row.target})"
        phases = "  ".join(f"{phase} {side['phases'][phase]:.2f}" for phase in PHASES if phase in side["phases"])
        memory = f"{side['peak_mib'] - side['loaded_mib']:6.0f} MiB over {side['loaded_mib']:.0f}"
        print(f"  {name:<21}{side['least']:8.2f} CPU s  ({phases})  {memory}{ratio}", flush=True)


def tune(row: Row, args: argparse.Namespace) -> None:
    """TRL alone, with batches of these sizes, and with a cache of a fixed size. The first step of each counts as well,
    so a single pass will do for long rows."""
    for batch, cache in [(size, None) for size in args.tune] + [(row.trl_batch, "static")]:
        with tempfile.TemporaryDirectory() as temporary:
            folder, tuned = Path(temporary), replace(row, trl_batch=batch)
            write_model(folder / "model")
            write_prompts(folder / "prompts.jsonl", row, args.passes + 2)
            with Side("trl", args.trl, job_of(tuned, folder, 0) | {"trl_cache": cache}, folder) as side:
                for _ in range(args.passes):
                    side.timed(row)
                best = side.figures()
        phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in best["phases"].items())
        size = f"per_device_train_batch_size={batch} cache_implementation={cache}"
        print(f"{row.name} {size}: {best['least']:.2f} CPU s  ({phases})  peak {best['peak_mib']:.0f} MiB", flush=True)


def draw(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """A panel a row: what each side takes to generate and to train, one on top of the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * len(rows) + 1, 3.9), layout="constrained")
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for panel, found in zip(panels, rows):
        names, bottom = list(found["sides"]), np.zeros(len(found["sides"]))
        for phase, color in (("generate", "C1"), ("train", "C3")):
            heights = np.array([side["phases"][phase] for side in found["sides"].values()])
            panel.bar(names, heights, bottom=bottom, color=color, label=phase)
            bottom += heights
        panel.set_title(Row(**found["row"]).name, fontsize=10)
        panel.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=7)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("CPU seconds of a step")
    panels[0].legend(fontsize=8)
    title = "A GRPO step on one CPU thread (prompts x completions, tokens of a prompt / of a completion)"
    figure.suptitle(title, fontsize=11)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="and draw them here")
    parser.add_argument("--passes", type=int, default=3, help="timed steps of each; the least counts")
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(ROWS)), help="by number; default: all")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--max-tokens", type=int, default=8192, help="batch.max_tokens of isoloss")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write tables of isoloss's phases there")
    parser.add_argument("--trl", type=Path, default=TRL_PYTHON, help="the Python of an environment with TRL")
    parser.add_argument("--tune", type=int, nargs="+", metavar="BATCH", help="compare batch sizes of TRL, no more")
    args = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("this benchmark is about one CPU thread: run it with CUDA_VISIBLE_DEVICES= (empty)")
    with_trl = args.trl.exists()
    if not with_trl:
        print(f"there is no {args.trl}, which make bench-rl makes: isoloss is measured alone")
    rows = [ROWS[index] for index in args.rows]
    if args.tune and with_trl:
        for row in rows:
            tune(row, args)
        return
    found = []
    for row in rows:
        found.append(measure(row, args, with_trl))
        report(found[-1], row)
        if args.out:
            figures = {"rows": found, "load_average": os.getloadavg()}
            args.out.write_text(json.dumps(figures, indent=2) + "\n")
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
