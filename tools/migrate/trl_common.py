"""What TRL's configurations share: transformers' TrainingArguments, TRL's ModelConfig and ScriptArguments.

Names and defaults: trl/trainer/base_config.py, trl/trainer/model_config.py, trl/scripts/utils.py, and
transformers/training_args.py.
"""

import math
from typing import Any

from isoloss.tools.migrate.table import UNSET, Row, Settings, changes, lost_images, none, to

OURS = {"save_steps": "checkpoint.every", "eval_steps": "train.eval_every"}
SCHEDULES = ("constant", "linear", "cosine")


def window(s: Settings) -> int:
    """Sequences in an optimizer step, over all processes."""
    return s.integer("per_device_train_batch_size") * s.integer("gradient_accumulation_steps") * processes(s)


def processes(s: Settings) -> int:
    return s.integer("processes")


def warmup(s: Settings) -> int:
    """A number of steps, or below 1 a share of them; the share had a name of its own."""
    given, total = s.number("warmup_steps"), s.positive("max_steps")
    share = given if 0 < given < 1 else float(s("warmup_ratio") or 0)
    return int(given) if given >= 1 else math.ceil(share * total) if total else 0


def lost_share(s: Settings) -> str | None:
    share = 0 < s.number("warmup_steps") < 1 or bool(s("warmup_ratio"))
    known = s.positive("max_steps") or not share
    return None if known else f"a share of steps whose number is in the data: optim.warmup_steps is it x {run_steps(s)}"


def run_steps(s: Settings) -> str:
    """The optimizer steps of a run whose rows are not known, for a user to work out."""
    return f"num_train_epochs={s('num_train_epochs')} x rows / {window(s)}"


def schedule(s: Settings) -> Any:
    name = s.text("lr_scheduler_type").replace("constant_with_warmup", "constant").replace("_with_min_lr", "")
    return name if name in SCHEDULES else UNSET


def lost_schedule(s: Settings) -> str | None:
    return "isoloss has constant, linear and cosine: give optim.schedule" if schedule(s) is UNSET else None


def min_lr(s: Settings) -> float:
    given = s("lr_scheduler_kwargs") or {}
    return float(given.get("min_lr", s.number("learning_rate") * float(given.get("min_lr_rate", 0))))


def interval(key: str, strategy: str):
    """Optimizer steps between two of a kind; below 1 they are a share of the run's. UNSET: not done by steps."""

    def steps(s: Settings) -> Any:
        if s.text(strategy) != "steps" or s(key) is None or lost_interval(key, strategy)(s):
            return UNSET
        given = s.number(key)
        return math.ceil(given * s.integer("max_steps")) if 0 < given < 1 else s.integer(key)

    return steps


def lost_interval(key: str, strategy: str):
    """isoloss counts steps, and saves and evaluates at the end of a run: one epoch is that."""

    def lost(s: Settings) -> str | None:
        name = s.text(strategy)
        if name == "epoch" and (s.number("num_train_epochs") > 1 or s.positive("max_steps")):
            return f"once an epoch, whose number of steps is in the data: {OURS[key]} is rows / {window(s)}"
        if name == "best":
            return f"isoloss keeps no best checkpoint by itself: give {OURS[key]} and checkpoint.keep"
        share = name == "steps" and s(key) is not None and 0 < s.number(key) < 1
        unknown = share and not s.positive("max_steps")
        return f"a share of steps whose number is in the data: {OURS[key]} is it x {run_steps(s)}" if unknown else None

    return lost


def precision(s: Settings) -> str:
    return "fp32" if s("bf16") is False else "bf16"


KEYS = {
    "model.path": lambda s: s("model_name_or_path") or UNSET,
    "data.train": lambda s: [s.text("dataset_name")] if s.has("dataset_name") and not lost_dataset(s) else UNSET,
    "data.template_kwargs": lambda s: s("chat_template_kwargs") or UNSET,
    "optim.lr": lambda s: s.number("learning_rate"),
    "optim.min_lr": min_lr,
    "optim.warmup_steps": warmup,
    "optim.schedule": schedule,
    "optim.weight_decay": lambda s: s.number("weight_decay"),
    "optim.betas": lambda s: [s.number("adam_beta1"), s.number("adam_beta2")],
    "optim.eps": lambda s: s.number("adam_epsilon"),
    "optim.clip": lambda s: s.number("max_grad_norm"),
    "memory.recompute": lambda s: "full" if s.flag("gradient_checkpointing") else UNSET,
    "train.steps": lambda s: s.positive("max_steps") or UNSET,
    "train.epochs": lambda s: max(1, math.ceil(s.number("num_train_epochs"))),
    "train.seed": lambda s: s.integer("seed"),
    "train.precision": precision,
    "train.eval_every": interval("eval_steps", "eval_strategy"),
    "checkpoint.every": interval("save_steps", "save_strategy"),
    "checkpoint.keep": lambda s: s.positive("save_total_limit") or UNSET,
    "output_dir": lambda s: s("output_dir") or UNSET,
}


def lost_epochs(s: Settings) -> str | None:
    whole = s.number("num_train_epochs").is_integer() or s.positive("max_steps")
    return (
        None
        if whole
        else f"train.epochs is a whole number, {math.ceil(s.number('num_train_epochs'))}: or give train.steps"
    )


def before(s: Settings) -> list[str]:
    told = []
    if not s.has("processes"):
        told.append("processes: TRL's batch sizes are of one process, and a configuration does not say how many there "
                    "were; 1 is assumed, or add processes=N")  # fmt: skip
    if not s.has("dataset_name") or lost_dataset(s):
        told.append("data.train: Parquet or JSON Lines files, such as those of the data set")
    return told


def lost_dataset(s: Settings) -> str | None:
    path = s.text("dataset_name")
    local = path.startswith(("/", ".")) or path.endswith((".jsonl", ".parquet"))
    return None if local else "data.train names files: download the data set's Parquet or JSON Lines, and name those"


ROWS: tuple[Row, ...] = (
    to("model_name_or_path", "model.path", None, lost_images("model_name_or_path"), "result"),
    to("dataset_name", "data.train", None, lost_dataset),
    to("chat_template_kwargs", "data.template_kwargs"),
    to("per_device_train_batch_size", "batch.global_size batch.max_tokens algorithm.minibatches", 8),
    to("gradient_accumulation_steps", "batch.global_size algorithm.minibatches", 1),
    to("processes", "batch.global_size algorithm.minibatches", 1),
    to("learning_rate", "optim.lr optim.min_lr", 5e-5),
    to("lr_scheduler_type", "optim.schedule", "linear", lost_schedule, "result"),
    to("lr_scheduler_kwargs", "optim.min_lr"),
    to("warmup_steps", "optim.warmup_steps", 0, lost_share, "give"),
    to("warmup_ratio", "optim.warmup_steps", None, lost_share, "give"),
    to("gradient_checkpointing", "memory.recompute", True),
    to("weight_decay", "optim.weight_decay", 0.0),
    to("adam_beta1", "optim.betas", 0.9),
    to("adam_beta2", "optim.betas", 0.999),
    to("adam_epsilon", "optim.eps", 1e-8),
    to("max_grad_norm", "optim.clip", 1.0),
    to("max_steps", "train.steps", -1),
    to("num_train_epochs", "train.epochs", 3, lost_epochs, "give"),
    to("seed", "train.seed", 42),
    to("bf16", "train.precision", None),
    to("eval_strategy", "train.eval_every", "no", lost_interval("eval_steps", "eval_strategy"), "give"),
    to("eval_steps", "train.eval_every", None, lost_interval("eval_steps", "eval_strategy"), "give"),
    to("save_strategy", "checkpoint.every", "steps", lost_interval("save_steps", "save_strategy"), "give"),
    to("save_steps", "checkpoint.every", 500, lost_interval("save_steps", "save_strategy"), "give"),
    to("save_total_limit", "checkpoint.keep"),
    to("output_dir", "output_dir"),
    *changes("isoloss trains in bf16 with fp32 weights in the optimizer, or in fp32", "fp16", "dtype", "torch_dtype",
             neutral=("float32", "bfloat16", "auto")),
    *none("isoloss trains in bf16 with fp32 weights in the optimizer, or in fp32", "tf32", "bf16_full_eval",
          "fp16_full_eval", neutral=(False, None)),
    *changes("isoloss has AdamW alone", "optim", "optim_args", "optim_target_modules",
             neutral=("adamw_torch", "adamw_torch_fused")),
    *changes("isoloss has no adapters (LoRA): it trains all weights", "use_peft"),
    *changes("isoloss has no adapters (LoRA): it trains all weights", "lora_*", "use_rslora", "use_dora",
             when=lambda s: s.on("use_peft")),
    *changes("isoloss has no quantized weights: it trains all weights in full", "load_in_8bit", "load_in_4bit"),
    *none("a setting of quantized weights, which isoloss lacks", "bnb_4bit_*", "use_bnb_nested_quant"),
    *none("isoloss builds the model itself from config.json, with its own attention; memory.recompute decides what is "
          "recomputed", "attn_implementation", "model_revision", "model_init_kwargs", "trust_remote_code",
          "gradient_checkpointing_kwargs", "activation_offloading",
          "activation_checkpointing",
          "activation_checkpointing_kwargs", "torch_compile*", "use_liger_kernel", "liger_kernel_config", "use_cache",
          "disable_dropout", "cast_lm_head_to_fp32"),
    *changes("dropout, label smoothing and noise are refused: the loss would not depend on the samples alone",
             "neftune_noise_alpha", "label_smoothing_factor", neutral=(0,)),
    *changes("moe.aux_loss=sequence balances experts; transformers' loss depends on micro-batches",
             "router_aux_loss_coef", neutral=(0,)),
    *none("rows must have the columns of docs/rewards.md: write your column as `prompt`", "dataset_prompt_column",
          neutral=("prompt", None), matter="give"),
    *none("rows must have `messages`, `prompt` and `completion`, or `text` (docs/train.md): write your column so",
          "dataset_text_field", neutral=("text", None), matter="give"),
    *none("the parallel.* keys, Megatron-Core's distributed optimizer and torchrun", "deepspeed", "fsdp*", "ddp_*",
          "accelerator_config", "parallelism_config", "local_rank", "use_cpu", "ds3_gather_for_generation",
          neutral=(None,)),
    *none("metrics.jsonl and TensorBoard in output_dir, a row for each step", "report_to", "logging_*", "log_*",
          "run_name", "project", "trackio_*", "include_num_input_tokens_seen", "include_for_metrics", "disable_tqdm",
          "num_completions_to_print", "skip_memory_metrics", "debug"),
    *none("a Hugging Face folder in output_dir/hf, which you upload", "push_to_hub*", "hub_*"),
    *none("isoloss's loader, with the files of data.train and data.eval, in an order by train.seed", "dataset_*",
          "datasets", "streaming", "test_split_size", "dataloader_*", "data_seed", "remove_unused_columns",
          "label_names",
          "train_sampling_strategy", "length_column_name", "group_by_length", "shuffle_dataset", "ignore_bias_buffers",
          "ignore_data_skip"),
    *none("an evaluation before the first step and after the last, and train.eval_every; same packing as training",
          "eval_*", "per_device_eval_batch_size", "prediction_loss_only", "batch_eval_metrics", "do_eval",
          "do_predict"),
    *none("checkpoints hold model, optimizer and the place in the data; checkpoint.resume=true goes on",
          "save_*", "resume_from_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
          "restore_callback_states_from_checkpoint", "enable_jit_checkpoint", "overwrite_output_dir", "do_train"),
    *none("train.deterministic=true", "full_determinism", neutral=(False,)),
    *none("give batch.max_tokens: it never changes what is learned", "auto_find_batch_size", neutral=(False,)),
    *none("rows are packed without padding, each attending to itself alone", "pad_to_multiple_of",
          "torch_empty_cache_steps", "pad_token", "eos_token", "dataset_kwargs", neutral=(None,)),
    *none("the shell's environment", "env", "config"),
)  # fmt: skip
