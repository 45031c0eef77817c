"""TRL's GRPOTrainer as a side of rl_step.py: python trl_side.py JOB.json, in an environment with TRL.

It is told what makes it fastest on a CPU: no gradient checkpointing, no bf16, no logs.
"""

import json
import platform
import sys
from pathlib import Path

import torch
import transformers
import trl
from datasets import load_dataset
from reward import score
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import Turns


class Side(GRPOTrainer):
    """found: what the step has to tell. first: where its first step is written, before the weights move."""

    def __init__(self, turns: Turns, first: Path, **rest):
        super().__init__(**rest)
        self.turns, self.first, self.found, self.losses = turns, first, {}, []

    def _generate_and_score_completions(self, inputs):
        with self.turns.phase("generate"):
            outputs = super()._generate_and_score_completions(inputs)
        self.found["completion_tokens"] = int(outputs["completion_mask"].sum())
        if not self.state.global_step:
            rows = {name: outputs[name].tolist() for name in ("prompt_ids", "completion_ids")}
            self.first.write_text(json.dumps(rows))
        return outputs

    def training_step(self, *inputs, **options):
        loss = super().training_step(*inputs, **options)
        self.losses.append(loss.item())
        return loss

    def _clip_grad_norm(self, model):
        if not self.state.global_step:  # in fp64: norms in fp32 are off by up to 5e-4 on a CPU
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            self.found["grad_norm"] = sum(torch.linalg.vector_norm(g.double()).item() ** 2 for g in grads) ** 0.5
        return super()._clip_grad_norm(model)


class OneAtATime(TrainerCallback):
    """A step goes from the end of one on_step_begin to the beginning of the next: everything between counts."""

    def __init__(self):
        self.side: Side

    def on_step_begin(self, args, state, control, **rest):
        side = self.side
        if state.global_step:
            side.turns.end("train", **side.found, loss=sum(side.losses))
        side.found, side.losses = {}, []
        side.turns.begin()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    turns, callback = Turns(), OneAtATime()
    row, folder = job["row"], Path(job["folder"])
    sequences = row["prompts"] * row["group"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=row["trl_batch"],
        gradient_accumulation_steps=sequences // row["trl_batch"],
        num_generations=row["group"],
        max_completion_length=row["completion"],
        cache_implementation=job["trl_cache"],
        # A token that the model does not have: no completion ends early.
        generation_kwargs={"eos_token_id": job["never"]},
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        max_grad_norm=job["clip"],
        max_steps=1_000_000,
        seed=job["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    side = Side(
        turns,
        folder / "trl_first.json",
        model=job["model"],
        reward_funcs=score,
        args=config,
        train_dataset=load_dataset("json", data_files=job["data"], split="train", cache_dir=str(folder / "cache")),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[callback],
    )
    side.eos_token_ids = [job["never"]]
    callback.side = side
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    turns.loaded({**versions, "python": platform.python_version()})
    side.train()


if __name__ == "__main__":
    main()
