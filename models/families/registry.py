"""The models that isoloss trains, by the name that config.json gives under `architectures`."""

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.weights import run_config
from isoloss.models.weights.distcp import is_checkpoint
from isoloss.models.weights.iterations import checkpoint_folder
from isoloss.models.weights.manifest import read_json
from isoloss.parallel.errors import UserError

# Each names a module of this folder.
FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
}
# The folder inside of a checkpoint that holds all of the Hugging Face folder but the weights.
HUGGINGFACE = "huggingface"


def family_of(name: str) -> ModuleType:
    """The module of a name of FAMILIES. It has `architecture(config)`, of a parsed config.json, which raises UserError
    naming the field that is not supported."""
    return importlib.import_module(f"{__package__}.{FAMILIES[name]}")


def hf_folder(path: str | Path) -> Path:
    """Where config.json and the tokenizer of a model are: `path` itself, or for a checkpoint the folder inside of it,
    or beside it where `path` is a folder of iterations.

    Raises UserError where a checkpoint has none.
    """
    path, checkpoint = Path(path), checkpoint_folder(path)
    if not is_checkpoint(checkpoint):
        return path
    for place in (checkpoint, path):
        if (place / HUGGINGFACE / "config.json").is_file():
            return place / HUGGINGFACE
    origin = run_config.hf_model(checkpoint)
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
        return family_of(_architecture_name(config, folder)).architecture(config)
    except UserError as error:
        message = str(error)
        raise UserError(f"{folder}/{message}" if message.startswith("config.json: ") else message) from None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`, parsed and not interpreted."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"model.path={folder} is not a folder; give one with config.json, tokenizer and safetensors")
    if not path.is_file():
        raise UserError(f"model.path={folder} has no config.json; give the folder of a Hugging Face model")
    return read_json(path, "copy it again from the model's source")


def _architecture_name(config: Mapping[str, Any], folder: Path) -> str:
    names = config.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"{folder}/config.json: architectures={names!r} must be a list of one name; known are {known}")
    if names[0] not in FAMILIES:
        nearest = difflib.get_close_matches(names[0], FAMILIES, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise UserError(f"{folder}/config.json: architectures={names[0]} is not supported; known are {known}{hint}")
    return names[0]
