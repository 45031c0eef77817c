"""verl's supervised fine-tuning (verl.trainer.sft_trainer): its keys, in ours.

Names and defaults: verl/trainer/config/sft_trainer_engine.yaml. The loss: sft_loss in verl/workers/utils/losses.py.
"""

from typing import Any

from isoloss.tools.migrate.denominator import Denominator
from isoloss.tools.migrate.releases import Sizes
from isoloss.tools.migrate.table import UNSET, Row, Settings, Source, changes, lost_images, none, to

LAYOUT = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "expert_model_parallel_size": "ep",
          "virtual_pipeline_model_parallel_size": "vpp", "context_parallel_size": "ring",
          "expert_tensor_parallel_size": "etp"}  # fmt: skip
OVERLONG = {"error": "error", "right": "truncate"}


def max_tokens(s: Settings) -> int:
    shared = s.integer("engine.ulysses_sequence_parallel_size") * (s.positive("engine.context_parallel_size") or 1)
    if s.flag("data.use_dynamic_bsz"):
        return s.integer("data.max_token_len_per_gpu") * shared
    return s.integer("data.micro_batch_size_per_gpu") * s.integer("data.max_length")


def min_lr(s: Settings) -> float:
    return s.number("optim.min_lr") if s.has("optim.min_lr") else s.number("optim.lr") * s.number("optim.min_lr_ratio")


def warmup(s: Settings) -> int:
    total = s.positive("trainer.total_training_steps") or 0
    return s.positive("optim.lr_warmup_steps") or int(s.number("optim.lr_warmup_steps_ratio") * total)


def lost_ratio(s: Settings) -> str | None:
    known = s.positive("trainer.total_training_steps") or not s.number("optim.lr_warmup_steps_ratio")
    return (
        None
        if known
        else (
            f"a share of steps whose number is in the data: optim.warmup_steps is it x trainer.total_epochs="
            f"{s.integer('trainer.total_epochs')} x rows / {s.integer('data.train_batch_size')}"
        )
    )


def recompute(s: Settings) -> Any:
    if "megatron" in (s.named("engine"), s.named("engine.strategy"), s.named("engine.name")):
        granularity = s.named("engine.override_transformer_config.recompute_granularity")
        return granularity if granularity in ("full", "selective") else UNSET
    return "full" if s.flag("model.enable_gradient_checkpointing") else UNSET


def lora(s: Settings) -> bool:
    return any(s.named(f"model.{name}") for name in ("lora_rank", "lora.rank", "lora_adapter_path"))


def mtp(s: Settings) -> bool:
    return all(s.on(f"model.mtp.{name}") for name in ("enable", "enable_train"))


def schedule(s: Settings) -> Any:
    style = s.first("optim.lr_scheduler_type", "optim.lr_decay_style", "optim.warmup_style")
    return style if style in ("constant", "linear", "cosine") else UNSET


def lost_truncation(s: Settings) -> str | None:
    return None if s("data.truncation") in OVERLONG else "a longer row is an error, is dropped, or loses its end"


def lost_resume(s: Settings) -> str | None:
    return None if s("trainer.resume_mode") == "disable" else "isoloss starts anew unless checkpoint.resume=true"


KEYS = {
    "model.path": lambda s: s("model.path") or UNSET,
    "model.tokenizer": lambda s: s("model.tokenizer_path") or UNSET,
    "data.train": lambda s: s.texts("data.train_files") or UNSET,
    "data.eval": lambda s: s.texts("data.val_files") or UNSET,
    "data.max_length": lambda s: s.integer("data.max_length"),
    "data.overlong": lambda s: OVERLONG.get(s.text("data.truncation"), "error"),
    "data.template_kwargs": lambda s: s("data.apply_chat_template_kwargs") or UNSET,
    "batch.global_size": lambda s: s.integer("data.train_batch_size"),
    "batch.max_tokens": max_tokens,
    **{f"parallel.{ours}": lambda s, name=name: s.positive(f"engine.{name}") or 1 for name, ours in LAYOUT.items()},
    "parallel.ulysses": lambda s: s.integer("engine.ulysses_sequence_parallel_size"),
    "loss.aggregation": lambda s: "token-mean",
    "memory.recompute": recompute,
    "optim.lr": lambda s: s.number("optim.lr"),
    "optim.min_lr": min_lr,
    "optim.warmup_steps": warmup,
    "optim.schedule": schedule,
    "optim.weight_decay": lambda s: s.number("optim.weight_decay"),
    "optim.betas": lambda s: [float(beta) for beta in s("optim.betas")],
    "optim.clip": lambda s: s.number("optim.clip_grad"),
    "train.steps": lambda s: s.positive("trainer.total_training_steps") or UNSET,
    "train.epochs": lambda s: s.integer("trainer.total_epochs"),
    "train.seed": lambda s: s.integer("trainer.seed"),
    "train.precision": lambda s: "bf16",
    "train.eval_every": lambda s: s.positive("trainer.test_freq") or 0,
    "checkpoint.every": lambda s: s.positive("trainer.save_freq") or 0,
    "checkpoint.keep": lambda s: s.positive("trainer.max_ckpt_to_keep") or UNSET,
}

ROWS: tuple[Row, ...] = (
    to("model.path", "model.path", None, lost_images("model.path"), "result"),
    to("model.tokenizer_path", "model.tokenizer"),
    to("data.train_files", "data.train", []),
    to("data.val_files", "data.eval", []),
    to("data.train_batch_size", "batch.global_size", 256),
    to("data.micro_batch_size_per_gpu", "batch.max_tokens", 4),
    to("data.max_token_len_per_gpu", "batch.max_tokens", 8192),
    to("data.use_dynamic_bsz", "batch.max_tokens", True),
    to("data.max_length", "data.max_length", 1024),
    to("data.truncation", "data.overlong", "error", lost_truncation),
    to("data.apply_chat_template_kwargs", "data.template_kwargs"),
    to("model.enable_gradient_checkpointing", "memory.recompute", True),
    to("engine.override_transformer_config.recompute_granularity", "memory.recompute"),
    *(to(f"engine.{name}", f"parallel.{ours}") for name, ours in LAYOUT.items()),
    to("engine.ulysses_sequence_parallel_size", "parallel.ulysses", 1),
    to("optim.lr", "optim.lr optim.min_lr", 1e-3),
    to("optim.min_lr", "optim.min_lr"),
    to("optim.min_lr_ratio", "optim.min_lr", 0.0),
    to("optim.lr_warmup_steps", "optim.warmup_steps", -1),
    to("optim.lr_warmup_steps_ratio", "optim.warmup_steps", 0.0, lost_ratio, "give"),
    to("optim.lr_scheduler_type", "optim.schedule", "constant"),
    to("optim.lr_decay_style", "optim.schedule"),
    to("optim.warmup_style", "optim.schedule"),
    to("optim.weight_decay", "optim.weight_decay", 0.01),
    to("optim.betas", "optim.betas", [0.9, 0.999]),
    to("optim.clip_grad", "optim.clip", 1.0),
    to("trainer.total_training_steps", "train.steps"),
    to("trainer.total_epochs", "train.epochs", 4),
    to("trainer.seed", "train.seed", 1),
    to("trainer.test_freq", "train.eval_every", -1),
    to("trainer.save_freq", "checkpoint.every", -1),
    to("trainer.max_ckpt_to_keep", "checkpoint.keep"),
    to("trainer.resume_mode", "checkpoint.resume", "auto", lost_resume),
    *changes("isoloss has no adapters (LoRA): it trains all weights", "model.lora_rank", "model.lora_alpha",
             "model.target_modules", "model.exclude_modules", "model.lora_adapter_path", "model.lora.*", when=lora),
    *changes("isoloss has no multi-token prediction: its loss is not added", "model.mtp.*", when=mtp),
    *changes("isoloss trains on text alone: no image, video or sound is learned from", "data.image_key",
             "data.video_key", "data.audio_key", "data.mm_processor_kwargs", "engine.freeze_vision_tower",
             neutral=({},)),
    *changes("isoloss trains in bf16, without quantization", "engine.dtype", "engine.qat.enable",
             neutral=("bfloat16", "bf16")),
    *changes("isoloss reads all rows of the files by its own loader", "data.train_max_samples", "data.custom_cls.path",
             neutral=(-1,)),
    *changes("isoloss has AdamW alone", "optim.optimizer", neutral=("AdamW", "adam", "FusedAdam")),
    *none("rows are always packed without padding", "model.use_remove_padding", "data.pad_mode", "engine.pad_to_length",
          "engine.use_remove_padding"),
    *none("config.json of model.path says what the model is; memory.recompute what is recomputed", "model.*"),
    *none("Megatron-Core's distributed optimizer and the memory.* keys instead", "engine.*"),
    *none("AdamW, with a warm-up from 0 over the whole run", "optim.*",
          neutral=("AdamW", "adam", "torch.optim", None, 0, 0.0, 0.5, True, -1, "constant", "exponential", False)),
    *none("rows have `messages`, `prompt` and `completion`, or `text` (docs/train.md): write your columns so",
          "data.messages_key", "data.tools_key", "data.prompt_key", "data.response_key",
          neutral=("messages", "tools"), matter="give"),
    *none("data.template_kwargs holds it for all rows", "data.enable_thinking_key", "data.enable_thinking_default",
          neutral=(None,), matter="give"),
    *none("read by isoloss's own loader, all rows in an order by train.seed", "data.*",
          neutral=(-1, None, False, 8)),
    *none("checkpoints hold model, optimizer and the place in the data, on any layout", "checkpoint.*",
          "trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.resume_from_path"),
    *none("metrics.jsonl and TensorBoard in output_dir", "trainer.logger", "trainer.project_name",
          "trainer.experiment_name"),
    *none("torchrun decides how many processes run", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device"),
    *none("the plan always balances cost over ranks", "trainer.balance_batch"),
    *none("no profiler of its own", "trainer.profile_interval", "profiler.*", "global_profiler.*"),
    *none("verl's choice of files with defaults, which isoloss knows", "engine", "optim", "model", "defaults",
          "hydra.*"),
)  # fmt: skip


def loss(s: Settings) -> tuple[Denominator, list[str]]:
    return Denominator("token-mean"), []


SOURCE = Source("verl", ROWS, KEYS, lambda s: "sft", loss, lambda s: [], lambda s: (Sizes(), ["sft"]))
