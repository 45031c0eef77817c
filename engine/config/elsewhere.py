"""Map names of other trainers to keys: TRL and Hugging Face's Trainer, verl, slime and Megatron-LM.

Nearly all names are in the tables of trainers/, by which `isoloss.tools.migrate` translates whole configurations.
`NAMES` adds what they lack: names of other releases and trainers, and those by which a user means another key.
"""

import functools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "trainers"
# Last parts of names, without the groups before them, by key.
NAMES = {
    "model.path": "pretrained_model_name_or_path",
    "model.tokenizer": "tokenizer_name",
    "data.train": "dataset dataset_path train_file train_data_path",
    "data.eval": "eval_data validation_file",
    "data.max_length": "max_seq_len seq_length cutoff_len",
    "data.system": "default_system",
    "batch.global_size": "batch_size global_batch_size",
    "parallel.tp": "tensor_parallel_size",
    "parallel.pp": "pipeline_parallel_size",
    "parallel.ulysses": "cp sp",
    "parallel.distributed_optimizer": "use_distributed_optimizer",
    "memory.offload_optimizer": "optimizer_cpu_offload optimizer_offload",
    "train.steps": "train_iters",
    "train.precision": "fp16 dtype torch_dtype",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules",
    "output_dir": "save_dir default_local_dir",
    "rollout.backend": "use_vllm",
    "algorithm.loss": "loss_type",
    "reward.function": "reward_fn",
}
KEYS_BY_NAME = {name: key for key, names in NAMES.items() for name in names.split()}
# Explanation by a word of a name that has no key.
WITHOUT_A_KEY = {
    **dict.fromkeys(("peft", "adapter"), "lora.rank above 0 trains an adapter (docs/lora.md)"),
    "lora.dropout": "adapters have no dropout, so that a step depends on its samples alone; leave it out",
    "lora.use_rslora": "lora.scaling=sqrt-rank multiplies by alpha / sqrt(rank)",
    "lora.bias": "adapters have no bias, and those of the model stay as they are; leave it out",
    "lora.enabled": "lora.rank above 0 trains an adapter (docs/lora.md)",
    "qlora": "lora.rank above 0 trains an adapter, of a model whose weights stay in train.precision (docs/lora.md)",
    **dict.fromkeys(
        ("logger", "wandb", "mlflow", "swanlab", "trackio", "tensorboard", "report_to", "logging_dir"),
        "every run writes metrics.jsonl and files of TensorBoard into output_dir, and there are no other loggers",
    ),
    **dict.fromkeys(
        (
            *("per_device", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("micro_batch_size", "micro_batch_size_per_gpu", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"),
        ),
        "a step has batch.global_size sequences on any number of devices, and batch.max_tokens bounds the tokens of a "
        "micro-batch",
    ),
    **dict.fromkeys(("packing", "use_dynamic_bsz"), "rows are always packed, up to batch.max_tokens"),
    **dict.fromkeys(("deepspeed", "fsdp"), "a model is divided by parallel.* and its optimizer by data-parallel ranks"),
}


Table = Mapping[str, Any]  # rows by name


def key_of(name: str) -> str | None:
    """Return the key for a name of another trainer, which may have that trainer's groups before it."""
    name = _plain(name)
    if _by_word(name) is not None:
        return None
    last, (keys, by_last_part) = name.rsplit(".", 1)[-1], _keys_of_tables()
    if name != last and name in keys:
        return keys[name]
    if name != last and explanation(name, {key.partition(".")[0] for key in keys.values()}):
        return None  # a setting of another trainer's servers, for example, that is called as one of the trainer's
    return KEYS_BY_NAME.get(last) or keys.get(last) or by_last_part.get(last)


def explanation(name: str, groups: Collection[str] = ()) -> str | None:
    """Return why there is no key for a name that another trainer has; None for other names.

    groups: groups of keys. A name in one of them is explained only if it stands in a table as it is.
    """
    name = _plain(name)
    if (by_word := _by_word(name)) is not None:
        return by_word
    is_ours = name.partition(".")[0] in groups
    found = [
        (len(pattern), reason)
        for pattern, reason in _reasons()
        if pattern == name or (pattern.endswith("*") and name.startswith(pattern[:-1]) and not is_ours)
    ]
    return max(found)[1] if found else None


def _plain(name: str) -> str:
    """Return a name as keys are written: --save-interval is save_interval."""
    return name.lstrip("-").replace("-", "_")


def _by_word(name: str) -> str | None:
    words = [name, *name.split("."), *re.split(r"[._]", name)]
    return next((WITHOUT_A_KEY[word] for word in words if word in WITHOUT_A_KEY), None)


@functools.cache
def _tables() -> list[dict[str, Table]]:
    return [tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("*.toml"))]


@functools.cache
def _keys_of_tables() -> tuple[dict[str, str], dict[str, str]]:
    """Return the first key that each name decides, and the same by last parts that stand for one key and end no
    key."""
    keys = {
        _plain(name): str(row["to"]).split()[0].partition("|")[0]
        for table in _tables()
        for name, row in table["keys"].items()
        if "to" in row
    }
    by_last_part: dict[str, set[str]] = {}
    for name, key in keys.items():
        by_last_part.setdefault(name.rsplit(".", 1)[-1], set()).add(key)
    own = {key.rsplit(".", 1)[-1] for key in keys.values()}
    return keys, {part: min(each) for part, each in by_last_part.items() if len(each) == 1 and part not in own}


def _reasons() -> Iterator[tuple[str, str]]:
    """Yield names without a key, of which a last * stands for any ending, and what is done instead."""
    for table in _tables():
        for section in ("changes", "give", "without"):
            for reason, rows in table.get(section, {}).items():
                names = rows["keys"] if isinstance(rows, Mapping) else rows
                yield from ((_plain(name), reason) for name in names)
