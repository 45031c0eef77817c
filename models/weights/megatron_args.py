"""The arguments of Megatron-LM that a checkpoint's `common.pt` holds, read without running anything that is in it.

Source of the names: Megatron-LM, megatron/training/argument_utils.py and gpt_builders.py.
"""

import argparse
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

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
            found = _Unpickler(io.BytesIO(archive.read(record))).load()
    except Exception:  # of the parsers; no weight stands in this file, and a checkpoint is read without it
        return {}
    args = found.get("args") if isinstance(found, dict) else None
    return vars(args) if isinstance(args, argparse.Namespace) else {}


class _Inert:
    """In place of anything that is not a plain value: takes what a pickle does to it, and does nothing."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "_Inert":
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    extend = append


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return argparse.Namespace if (module, name) == ("argparse", "Namespace") else _Inert

    def persistent_load(self, pid: Any) -> None:
        return None
