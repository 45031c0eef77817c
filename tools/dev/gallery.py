"""Make the pictures of docs/gallery.md again: each is what a job leaves, and the job is run.

python -m isoloss.tools.dev.gallery --model DIR        # in the root of the checkout; ten minutes on two CPU cores

DIR holds the config.json of the model that is planned (Qwen3-8B), and needs no weights.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from isoloss.engine.run.records import RunRecords
from isoloss.tools import command_line

COLORS = 64  # of a palette; plots need no more, and the files are a third as large
BUG = "rank-local-denominators"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser("dev.gallery", __doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder with the planned config.json")
    parser.add_argument("--out", type=Path, default=Path("docs/gallery"), metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.model.resolve(), arguments.out.resolve())


def make(work: Path, model: Path, out: Path) -> None:
    """Run every job in the folder `work`, and leave its picture in `out`."""
    run(work, "recipes.sft", "output_dir=sft")
    draw_loss(work / "sft", work / "sft.png")
    run(work, "recipes.sft", "preset=sort", "output_dir=runs/sft-sort")
    run(work, "recipes.grpo", "output_dir=grpo")
    run(work, "recipes.dapo", "output_dir=dapo")
    run(work, "tools.reward_curve", "grpo", "dapo", "--labels", "GRPO,DAPO", "--out", "rl.png")
    planned = ["sft", "preset=8b_h100", f"model.path={model}", "--gpus", "8", "--picture", "plan.png"]
    run(work, "tools.plan", *planned)
    run(work, "tools.prove", "--out", "proof")
    run(work, "tools.prove", "--plant", BUG, "--layouts", "tp2,ulysses2,dp2", "--out", "planted", status=1)
    pictures = {name: work / name for name in ("sft.png", "rl.png", "plan.png")}
    pictures |= {f"{name}.png": work / name / "proof.png" for name in ("proof", "planted")}
    for name, picture in pictures.items():
        shrink(picture, out / name)


def run(work: Path, module: str, *arguments: str, status: int = 0) -> None:
    print(f"isoloss.{module} {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", f"isoloss.{module}", *arguments], cwd=work, stdout=subprocess.DEVNULL)
    if done.returncode != status:
        sys.exit(f"isoloss.{module} ended with status {done.returncode}, not {status}")


def draw_loss(run: Path, out: Path) -> None:
    """Draw the losses of a run of supervised fine-tuning, and of its evaluations."""
    from matplotlib.figure import Figure

    records = RunRecords(run)
    trained, evaluated = list(records.metrics()), list(records.evaluations())
    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    panel.plot([row["step"] for row in trained], [row["loss"] for row in trained], linewidth=1, label="training")
    panel.plot([row["step"] for row in evaluated], [row["loss"] for row in evaluated], marker="o", label="data.eval")
    panel.set_xlabel("optimizer steps")
    panel.set_ylabel("loss (nats per target token)")
    panel.set_title("supervised fine-tuning of the shipped 2M-parameter model")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(out, dpi=100)


def shrink(picture: Path, out: Path) -> None:
    """Write a picture with a palette, without metadata."""
    from PIL import Image  # matplotlib brings it

    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLORS).save(out, optimize=True)


if __name__ == "__main__":
    main()
