"""Compare the model that trainers record next to a checkpoint with that of config.json. Megatron-Bridge records it in
`run_config.yaml`, Megatron-LM among its arguments (megatron_args).

Many differences between models show in no tensor: the base of the rotations, an epsilon, how experts are chosen.
Source of the names: Megatron-Core's TransformerConfig, and Megatron-Bridge's models/gpt_provider.py and
models/conversion/model_bridge.py. Fields that are absent are not compared.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.kind import Recorded
from isoloss.models.weights import megatron_args
from isoloss.parallel.runtime.errors import UserError

NAME = "run_config.yaml"
# What null means. Any other field that is null is not compared.
_NULL: Mapping[str, Any] = {
    "num_moe_experts": 0, "moe_shared_expert_intermediate_size": 0, "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 1, "moe_router_group_topk": 1, "seq_len_interpolation_factor": 1.0, "rope_scaling": False,
    "q_lora_rank": 0,
}  # fmt: skip


def check(folder: Path, arch: Architecture) -> None:
    """Raises UserError naming the first field of what a checkpoint notes down of its model that `arch` has not.

    A model that is the same is refused where its weights are others: Megatron-Core itself, with layers of Gated
    DeltaNet, makes every norm zero-centered, also the one inside of them, whose weight is then stored minus 1; and
    Megatron-Bridge gives Gemma 4 a second copy of the keys to project values.
    """
    path, prefix = folder / NAME, "model."
    if path.is_file():
        said = _said(_model(path))
    else:
        path, prefix, said = folder / megatron_args.NAME, "", _said(megatron_args.read_model(folder))
    for name, label, wanted in _wanted(arch):
        if name in said and not _same(said[name], wanted):
            raise UserError(
                f"{path}: {prefix}{name}={said[name]!r} where config.json ({arch.family}) calls for "
                f"{label}={wanted!r}; the checkpoint is of another model: give the config.json of the one that was "
                "trained"
            )
    if any(arch.linear) and said:
        raise UserError(
            f"{path}: Megatron-Core trained this {arch.family}, and stores the norms inside of Gated DeltaNet "
            "(out_norm) minus 1; export it to a Hugging Face folder there, and take that"
        )
    if said and any(isinstance(kind, Asymmetric) and kind.keys_as_values for kind in arch.kinds):
        raise UserError(
            f"{path}: Megatron-Bridge trained this {arch.family}, and stores a projection of values that the model has "
            "not; export it to a Hugging Face folder there, and take that"
        )


def hf_model(folder: Path) -> str | None:
    """The Hugging Face model that a checkpoint says it was made from."""
    path = folder / NAME
    model = _model(path) if path.is_file() else {}
    found = model.get("hf_model_id") or (model.get("extra_checkpoint_metadata") or {}).get("hf_model_id")
    return str(found) if found else None


def _model(path: Path) -> dict[str, Any]:
    """Return its model, with the fields that newer versions nest under `transformer` among the others."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        return {**found, **found.get("transformer", {})}
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{path} is damaged or not Megatron-Bridge's ({why}); copy it again, or delete it") from None


def _said(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they are meant."""
    null = {
        **_NULL,
        "num_query_groups": model.get("num_attention_heads"),
        "moe_ffn_hidden_size": model.get("ffn_hidden_size"),
    }
    said = {name: null.get(name) if value is None else value for name, value in model.items()}
    said = {name: value for name, value in said.items() if value is not None}
    activation = said.get("activation_func")
    if isinstance(activation, dict):
        activation = activation.get("_target_")
    if activation is not None:
        said["activation_func"] = str(activation).rpartition(".")[2]
    every, layers = said.get("moe_layer_freq"), said.get("num_layers")
    if isinstance(every, int) and isinstance(layers, int) and every > 0:
        said["moe_layer_freq"] = [int(layer % every == 0) for layer in range(layers)]
    elif not isinstance(every, list):  # an expression
        said.pop("moe_layer_freq", None)
    linear = said.get("linear_attention_freq")
    if (
        isinstance(linear, int) and isinstance(layers, int) and linear > 0
    ):  # a period of layers, of which the last has attention
        said["linear_attention_freq"] = [int((layer + 1) % linear > 0) for layer in range(layers)]
    if "low_freq_factor" in said and "scale_factor" in said:  # what earlier versions called Llama 3.1's scaling
        said |= {"rope_scaling": True, "rope_scaling_factor": said["scale_factor"]}
    if said.get("rope_type") == "rope":
        said.pop("rotary_scaling_factor", None)
    return said


def _same(one: Any, other: Any) -> bool:
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def _wanted(arch: Architecture) -> Iterator[Recorded]:
    yield "num_layers", "num_hidden_layers", arch.num_layers
    yield "hidden_size", "hidden_size", arch.hidden_size
    yield "vocab_size", "vocab_size", arch.vocab_size
    yield "layernorm_epsilon", "rms_norm_eps", arch.norm_eps
    yield "share_embeddings_and_output_weights", "tie_word_embeddings", arch.tie_embeddings
    yield "normalization", "normalization", "RMSNorm"
    yield "layernorm_zero_centered_gamma", "layernorm_zero_centered_gamma", arch.zero_centered_norm
    yield "gated_linear_unit", "gated_linear_unit", True
    yield from _agreed(arch)
    if any(arch.linear):
        yield "linear_attention_freq", "layer_types", [int(linear) for linear in arch.linear]
    yield "num_moe_experts", "num_experts", arch.experts.count if arch.experts else 0
    if arch.experts:
        yield "moe_layer_freq", "first_k_dense_replace", [int(sparse) for sparse in arch.sparse]


def _agreed(arch: Architecture) -> Iterator[Recorded]:
    """Fields of the layers, where all layers that have one agree. Of rotations, all bases are recorded, those of layers
    with a window first."""
    fields: dict[str, list[Recorded]] = {}
    for kind in arch.kinds:
        for recorded in kind.recorded():
            fields.setdefault(recorded[0], []).append(recorded)
    for name, found in fields.items():
        _, label, value = found[0]
        if all(other == found[0] for other in found):
            yield name, label, value
        elif name == "rotary_base":
            yield name, label, [theta for _, _, theta in reversed(found)]
