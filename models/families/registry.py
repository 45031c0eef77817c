"""The models that isoloss trains, by the name that config.json gives under `architectures`."""

import difflib
import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import TEXT_MODEL
from isoloss.models.weights import recorded_config
from isoloss.models.weights.checkpoint_dirs import checkpoint_folder
from isoloss.models.weights.distcp import is_checkpoint
from isoloss.models.weights.hf_checkpoint import tensor_names
from isoloss.models.weights.manifest import read_json
from isoloss.parallel.runtime.errors import UserError

# Each names a module of this folder.
FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Mistral4ForCausalLM": "mistral4",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK2ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "GptOssForCausalLM": "gpt_oss",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen3NextForCausalLM": "qwen3_next",
}
_SPARSE = "it attends to the tokens that an indexer chooses (DSA), of which there is no kernel for packed rows here"
_DELTA = "it has layers of Kimi Delta Attention, which are not built here"
_VISION = "it is Kimi-K2 behind a vision tower, in int4; write its language model in bfloat16 as KimiK2ForCausalLM"
# Known by the beginning of their name, and not trained. A model is what its file says, and none of these is another.
REFUSED: Mapping[str, str] = {
    "DeepseekV32": _SPARSE,
    "GlmMoeDsa": _SPARSE,
    "DeepseekV4": "it attends to compressed tokens, and its residual stream has four lanes (hyper-connections)",
    "Glm5Next": _DELTA,
    "KimiLinear": _DELTA,
    "KimiK3": _DELTA,
    "KimiK25": _VISION,
    "Kimi_K25": _VISION,
    "MiMoV2ForCausalLM": "of its line MiMo-V2-Flash alone is built here",
    "MiniMaxM3": "it attends to the blocks that an indexer chooses, of which there is no kernel for packed rows here",
}
# The folder inside of a checkpoint that holds all of the Hugging Face folder but the weights.
HUGGINGFACE = "huggingface"
# Of peft: transformers puts the adapter on whatever model it names.
ADAPTER = "adapter_config.json"


def family_of(name: str) -> ModuleType:
    """The module of a name of FAMILIES. It has `architecture(config)`, of a parsed config.json, which raises UserError
    naming the field that is not supported."""
    return importlib.import_module(f"{__package__}.{FAMILIES[name]}")


def hf_folder(path: str | Path) -> Path:
    """Return the folder of a model's config.json and tokenizer: `path` itself, or for a checkpoint or a run the folder
    inside of the (newest) checkpoint, else the one inside of `path`.

    Raises UserError where a checkpoint has none.
    """
    path, checkpoint = Path(path), checkpoint_folder(path)
    if not is_checkpoint(checkpoint):
        return checkpoint
    for place in (checkpoint, path):
        if (place / HUGGINGFACE / "config.json").is_file():
            return place / HUGGINGFACE
    origin = recorded_config.hf_model(checkpoint)
    raise UserError(
        f"{checkpoint} is a checkpoint without {HUGGINGFACE}/config.json, so nothing says what model it is; make that "
        "folder, with config.json and tokenizer of the Hugging Face model that it came from"
        + (f" ({origin})" if origin else "")
        + ", or give isoloss.tools.convert such a folder by --hf DIR"
    )


def read_architecture(folder: str | Path) -> Architecture:
    """The architecture of the Hugging Face model or the checkpoint in `folder`.

    Raises UserError where folder or config.json is missing, or names an architecture or a field that is not understood.
    """
    folder = hf_folder(folder)
    config = read_config(folder)
    try:
        arch = family_of(_architecture_name(config, folder)).architecture(config)
        return _as_filed(arch, folder)
    except UserError as error:
        message = str(error)
        raise UserError(f"{folder}/{message}" if message.startswith("config.json: ") else message) from None


def _as_filed(arch: Architecture, folder: Path) -> Architecture:
    """The architecture, by the names that the files of `folder` have where there are two spellings. Of a multimodal
    model with a prefix of its own, transformers reads and has written the common one. Of experts whose layer the hub
    holds together, as `stacked` says, it may write one by one."""
    if arch.head_prefix and any(name.startswith(TEXT_MODEL) for name in tensor_names(folder)):
        return replace(arch, tensor_prefix=TEXT_MODEL, head_prefix="")
    if arch.experts is None or arch.experts.names.stacked != "rows":
        return arch
    names = tensor_names(folder)
    if not names or any(name.endswith(".experts.gate_up_proj") for name in names):
        return arch
    apart = replace(arch.experts, names=replace(arch.experts.names, stacked=""))
    return arch.with_layers(lambda layer: replace(layer, mlp=apart) if layer.mlp.experts else layer)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`, parsed and not interpreted."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(
            f"model.path={folder} is not a folder; give one with config.json, tokenizer and safetensors"
            + hub_hint(folder)
        )
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"model.path={folder} holds an adapter ({ADAPTER}), which would not be read: give the folder of its "
            f"model, and lora.init={folder} to train the adapter on; or merge it into its model (isoloss-convert merge)"
        )
    if not path.is_file():
        raise UserError(f"model.path={folder} has no config.json; give the folder of a Hugging Face model")
    return read_json(path, "copy it again from the model's source")


def hub_hint(path: Path) -> str:
    """Return the advice for a missing folder `path` that looks like a model's name on the Hugging Face hub, or ""."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(path)):
        return ""
    return f". Nothing is downloaded from the Hugging Face hub: hf download {path} --local-dir {path.name} does that"


def _architecture_name(config: Mapping[str, Any], folder: Path) -> str:
    names = config.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"{folder}/config.json: architectures={names!r} must be a list of one name; known are {known}")
    reason = next((why for start, why in REFUSED.items() if names[0].startswith(start)), None)
    if reason is not None:
        raise UserError(f"{folder}/config.json: architectures={names[0]} is not supported: {reason}")
    if names[0] not in FAMILIES:
        nearest = difflib.get_close_matches(names[0], FAMILIES, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise UserError(f"{folder}/config.json: architectures={names[0]} is not supported; known are {known}{hint}")
    return names[0]
