"""What TRL's configurations share: transformers' TrainingArguments, TRL's ModelConfig and ScriptArguments.

Names and defaults: trl/trainer/base_config.py, trl/trainer/model_config.py, trl/scripts/utils.py, and
transformers/training_args.py.
"""

import math
from typing import Any

from isoloss.tools.migrate.table import UNSET, Row, Settings, none, to

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
    return None if known else "a share of steps whose number is in the data: give optim.warmup_steps"


def schedule(s: Settings) -> Any:
    name = s.text("lr_scheduler_type").replace("constant_with_warmup", "constant").replace("_with_min_lr", "")
    return name if name in SCHEDULES else UNSET


def lost_schedule(s: Settings) -> str | None:
    return "isoloss has constant, linear and cosine: give optim.schedule" if schedule(s) is UNSET else None


def min_lr(s: Settings) -> float:
    given = s("lr_scheduler_kwargs") or {}
    return float(given.get("min_lr", s.number("learning_rate") * float(given.get("min_lr_rate", 0))))


def interval(key: str, strategy: str):
    """Optimizer steps between two of a kind, 0 where it is not done by steps."""
    return lambda s: int(s.number(key) or 0) if s.has(key) and s.text(strategy) == "steps" else UNSET


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
    to("model_name_or_path", "model.path"),
    to("dataset_name", "data.train", None, lost_dataset),
    to("chat_template_kwargs", "data.template_kwargs"),
    to("per_device_train_batch_size", "batch.global_size batch.max_tokens algorithm.minibatches", 8),
    to("gradient_accumulation_steps", "batch.global_size algorithm.minibatches", 1),
    to("processes", "batch.global_size algorithm.minibatches", 1),
    to("learning_rate", "optim.lr optim.min_lr", 5e-5),
    to("lr_scheduler_type", "optim.schedule", "linear", lost_schedule),
    to("lr_scheduler_kwargs", "optim.min_lr"),
    to("warmup_steps", "optim.warmup_steps", 0, lost_share),
    to("warmup_ratio", "optim.warmup_steps", None, lost_share),
    to("weight_decay", "optim.weight_decay", 0.0),
    to("adam_beta1", "optim.betas", 0.9),
    to("adam_beta2", "optim.betas", 0.999),
    to("adam_epsilon", "optim.eps", 1e-8),
    to("max_grad_norm", "optim.clip", 1.0),
    to("max_steps", "train.steps", -1),
    to("num_train_epochs", "train.epochs", 3, lost_epochs),
    to("seed", "train.seed", 42),
    to("bf16", "train.precision", None),
    to("eval_strategy", "train.eval_every", "no"),
    to("eval_steps", "train.eval_every"),
    to("save_strategy", "checkpoint.every", "steps"),
    to("save_steps", "checkpoint.every"),
    to("save_total_limit", "checkpoint.keep"),
    to("output_dir", "output_dir"),
    *none("isoloss trains in bf16 with fp32 weights in the optimizer, or in fp32", "fp16", "tf32", "dtype",
          "torch_dtype",
          "bf16_full_eval", "fp16_full_eval", neutral=(False, None, "float32", "bfloat16", "auto")),
    *none("AdamW", "optim", "optim_args", "optim_target_modules",
          neutral=(None, "adamw_torch", "adamw_torch_fused")),
    *none("isoloss has no adapters (LoRA) and no quantized weights: it trains all weights in full", "use_peft",
          "lora_*",
          "use_rslora", "use_dora", "load_in_8bit", "load_in_4bit", "bnb_4bit_*", "use_bnb_nested_quant",
          neutral=(False, None)),
    *none("isoloss builds the model itself from config.json, with its own attention; memory.recompute decides what is "
          "recomputed", "attn_implementation", "model_revision", "model_init_kwargs", "trust_remote_code",
          "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading",
          "activation_checkpointing",
          "activation_checkpointing_kwargs", "torch_compile*", "use_liger_kernel", "liger_kernel_config", "use_cache",
          "disable_dropout", "cast_lm_head_to_fp32"),
    *none("dropout, label smoothing and noise are refused: the loss would not depend on the samples alone",
          "neftune_noise_alpha", "label_smoothing_factor", neutral=(None, 0, 0.0)),
    *none("moe.aux_loss=sequence balances experts; transformers' loss depends on micro-batches", "router_aux_loss_coef",
          neutral=(0, 0.0)),
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
