"""The arguments of Megatron-LM that a checkpoint's `common.pt` holds, read without running anything that is in it.

Source of the names: Megatron-LM, megatron/training/argument_utils.py and gpt_builders.py.
"""

import zipfile
from pathlib import Path
from typing import Any

from isoloss.models.weights import restricted_pickle
from isoloss.models.weights.restricted_pickle import Name, RefusedError, inert

NAME = "common.pt"
# What TransformerConfig and GPTModel call them. `norm_epsilon` is that of earlier versions.
_RENAMED = {
    "norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts", "swiglu": "gated_linear_unit",
    "use_rope_scaling": "rope_scaling", "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}  # fmt: skip


def read_model(folder: Path) -> dict[str, Any]:
    """The fields of the model that was trained, by their names in Megatron-Core; none where nothing holds arguments."""
    args = _arguments(folder / NAME)
    model = {_RENAMED.get(name, name): value for name, value in args.items()}
    model.pop("vocab_size", None)  # the tokenizer's, if any
    if args.get("quick_geglu"):
        model.pop("gated_linear_unit", None)
    if not args.get("group_query_attention"):
        model["num_query_groups"] = None
    if "untie_embeddings_and_output_weights" in args:
        model["share_embeddings_and_output_weights"] = not args["untie_embeddings_and_output_weights"]
    return model if args else {}


def _arguments(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            (record,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if archive.getinfo(record).compress_type != zipfile.ZIP_STORED:
                return {}
            found = restricted_pickle.read(archive.read(record), _find, lambda persistent_id: None)
    except Exception:  # of the parsers; no weight stands in this file, and a checkpoint is read without it
        return {}
    args = found.get("args") if isinstance(found, dict) else None
    return args.values if isinstance(args, _Arguments) else {}


class _Arguments:
    """Stands for an argparse.Namespace."""

    def __init__(self):
        self.values: dict[str, Any] = {}


def _set(arguments: _Arguments, values: Any) -> None:
    if type(values) is not dict or any(type(name) is not str for name in values):
        raise RefusedError("arguments without names")
    arguments.values = values


def _find(module: str, name: str) -> Name:
    text = f"{module}.{name}"
    return Name(text, made=_Arguments, built=_set) if text == "argparse.Namespace" else inert(text)
