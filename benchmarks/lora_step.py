"""One SFT optimizer step of adapters (LoRA) on one CPU thread, against fine-tuning of the whole model and against PEFT.

    python benchmarks/lora_step.py [--out lora_step.json] [--passes 3] [--max-tokens 2048] [--rank 8]

Model, samples and precision are those of sft_step.py; every linear layer has an adapter, alpha 32, B random.

full: `Engine` without an adapter, as in sft_step.py.
lora: `Engine` with one.
peft: PEFT's model of transformers as its Trainer feeds it: four padded sequences at a time, logits everywhere.

lora and peft start from the same weights and factors. The first step of each is not timed: there their losses must
agree to 1e-6 and their gradient norms to 1e-5, or no ratio is printed. Then all take turns, and the least CPU seconds
(of the process, all threads) of each count.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from sft_step import (
    BETAS,
    CLIP,
    EPS,
    LOSS_TOLERANCE,
    LR,
    M27,
    NORM_TOLERANCE,
    Isoloss,
    Padded,
    cpu_seconds,
    make_samples,
    versions,
)
from torch import Tensor

from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.models.lora.initial import InitialFactors

ALPHA = 32


class Lora(Isoloss):
    """Adapters of the same model; see `Isoloss`."""

    def __init__(self, folder: str, max_tokens: int, rank: int):
        self.engine = Engine(
            build(
                Config,
                {
                    "model": {"path": folder, "from_scratch": True},
                    "batch": {"max_tokens": max_tokens},
                    "lora": {"rank": rank, "alpha": ALPHA},
                    "optim": {"lr": LR, "betas": list(BETAS), "eps": EPS, "clip": CLIP},
                    "train": {"precision": "fp32"},
                },
            )
        )
        self.adapter.load(InitialFactors(0, random_b=True))
        self.loss = cross_entropy(LossConfig())

    @property
    def adapter(self):
        assert self.engine.trained.adapter is not None
        return self.engine.trained.adapter

    def factors(self) -> dict[str, Tensor]:
        """Every factor by the name of its matrix's module in the model's files."""
        return {
            part.tensor: tensor.clone()
            for owned, whole in self.adapter.whole_tensors()
            for part, tensor in zip(owned.weight.parts, owned.weight.mapping.split(whole))
        }


class Peft(Padded):
    """PEFT's adapters of every linear layer but the output matrix."""

    def __init__(self, weights: dict[str, Tensor], factors: dict[str, Tensor], rank: int):
        from peft import LoraConfig, get_peft_model

        super().__init__(weights)
        config = LoraConfig(r=rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear")
        self.model = get_peft_model(self.model, config)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(factors[name.removeprefix("base_model.model.").replace(".default", "")])
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        assert len(self.parameters) == len(factors)
        self.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--passes", type=int, default=3, help="timed steps of each; the least counts")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch of isoloss")
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("this benchmark is about one CPU thread: run it with CUDA_VISIBLE_DEVICES= (empty)")
    torch.set_num_threads(1)
    samples = make_samples(args.sequences, M27["vocab_size"], seed=0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(M27))
        full, lora = Isoloss(folder, args.max_tokens), Lora(folder, args.max_tokens, args.rank)
    loops = {"full": full, "lora": lora, "peft": Peft(lora.weights(), lora.factors(), args.rank)}
    first = {name: loop.step(samples) for name, loop in loops.items()}
    for name, (loss, norm) in first.items():
        print(f"{name:<5} loss {loss:.9f}  gradient norm {norm:.9f}")
    off = [abs(ours / theirs - 1) for ours, theirs in zip(first["lora"], first["peft"])]
    if not (off[0] <= LOSS_TOLERANCE and off[1] <= NORM_TOLERANCE):
        sys.exit(f"lora and peft disagree by {off}: they do not compute the same step, so no ratio is printed")
    seconds = {name: [] for name in loops}
    for _ in range(args.passes):
        for name, loop in loops.items():
            seconds[name].append(cpu_seconds(loop, samples))
    best = {name: min(of_loop) for name, of_loop in seconds.items()}
    print(f"{len(samples)} sequences, {sum(map(len, samples))} tokens, rank {args.rank}; {versions()}")
    for name, least in best.items():
        passes = " ".join(f"{s:.2f}" for s in seconds[name])
        print(f"{name:<5}{least:8.2f} CPU-s a step   lora takes {best['lora'] / least:.3f} of it   passes {passes}")
    if args.out:
        rows = {
            name: {"loss": first[name][0], "grad_norm": first[name][1], "cpu_seconds": of_loop, "least": best[name],
                   "lora_over_this": best["lora"] / best[name]}
            for name, of_loop in seconds.items()
        }  # fmt: skip
        args.out.write_text(json.dumps({"versions": versions(), "rank": args.rank, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
