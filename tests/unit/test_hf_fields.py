"""A field that config.json leaves out, or gives as null, means what transformers' class takes it for, or is refused.

Every field of every tiny model is left out and set to null, those of its rotation and those of the text model within a
multimodal one as well. The class fills in what is missing, and what is read of its file must be what is read of ours.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from support.models import families
from support.models.multimodal import GEMMA_VISION, PIXTRAL, VISION
from transformers import Gemma4Config, Mistral3Config, PreTrainedConfig, Qwen3_5Config

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import IRRELEVANT
from isoloss.models.families.registry import family_of
from isoloss.parallel.runtime.errors import UserError

Config = dict[str, Any]
WRAPPED: dict[str, tuple[type[PreTrainedConfig], str, Config, Config]] = {
    "mistral": (Mistral3Config, "Mistral3ForConditionalGeneration", PIXTRAL, {"tie_word_embeddings": False}),
    "ministral-3": (Mistral3Config, "Mistral3ForConditionalGeneration", PIXTRAL, {"tie_word_embeddings": False}),
    "gemma-4": (Gemma4Config, "Gemma4ForConditionalGeneration", GEMMA_VISION, {}),
    "gemma-4-moe": (Gemma4Config, "Gemma4ForConditionalGeneration", GEMMA_VISION, {}),
    "qwen3.5": (Qwen3_5Config, "Qwen3_5ForConditionalGeneration", VISION, {}),
}
# They choose the class, or the reader does not look at them.
NOT_READ = IRRELEVANT | {
    "model_type", "router_aux_loss_coef", "max_window_layers", "vocab_size_per_layer_input", "use_double_wide_mlp",
    "moe_intermediate_size of gemma-4", "num_experts of gemma-4", "top_k_experts of gemma-4",
    "head_dim of deepseek-v3", "head_dim of mistral-4", "head_dim of deepseek-v3-plain", "qk_head_dim",
}  # fmt: skip
# The class keeps null, for which the model's code has a meaning of its own: there is none, or it follows from others.
NULL_HAS_A_MEANING = {
    "sliding_window", "q_lora_rank", "final_logit_softcapping", "attention_value_scale", "rotary_dim", "dtype",
    "use_bidirectional_attention", "per_layer_config", "head_dim", "num_nextn_predict_layers",
}  # fmt: skip
# As absent: by the model's code, which takes its default for what counts as false; or because the other place counts.
NULL_IS_ABSENT = {"beta_fast", "beta_slow", "original_max_position_embeddings"}


def ours(config: Config) -> Architecture | None:
    """None: refused, in one line."""
    try:
        return family_of(config["architectures"][0]).architecture(config)
    except UserError as error:
        assert str(error).startswith("config.json: ") and "\n" not in str(error)
        return None


def theirs(config_class: type[PreTrainedConfig], config: Config) -> Config | None:
    """The same file with every field; None: refused."""
    try:
        with warnings.catch_warnings(action="ignore"):
            found = config_class.from_dict(copy.deepcopy(config))
    except Exception:  # whatever its checks raise
        return None
    return json.loads(found.to_json_string(use_diff=False)) | {"architectures": config["architectures"]}


def paths(config: Config, under: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*under, name)
        if name in ("rope_parameters", "text_config", "full_attention", "sliding_attention"):
            yield from paths(value, (*under, name))


def changed(config: Config, path: tuple[str, ...], *value: Any) -> Config:
    """Without the field, or with this value."""
    config = copy.deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    inner |= dict.fromkeys(path[-1:], *value) if value else {}
    return config


def at(config: Config, path: tuple[str, ...]) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, dict) else None
    return config


def check(name: str, config_class: type[PreTrainedConfig], config: Config) -> int:
    """How many of the files without a field, or with a null, were understood and the same."""
    compared, around_text = 0, ("tie_word_embeddings",) if "text_config" in config else None
    assert ours(config) is not None and ours(config) == ours(theirs(config_class, config) or {})
    for path in list(paths(config)):
        field = path[-1]
        if {field, f"{field} of {name}"} & NOT_READ or field in ("architectures", "text_config", "vision_config"):
            continue
        file = changed(config, path)
        found, full = ours(file), theirs(config_class, file)
        if found is not None and path != around_text:  # where the weights decide, in transformers as well
            assert full is not None and found == ours(full), f"{name}: {path} left out"
            compared += 1
        file = changed(config, path, None)
        found, full = ours(file), theirs(config_class, file)
        if found is None:
            continue
        if full is not None and at(full, path) is not None:
            assert found == ours(full), f"{name}: {path} null"
        elif field == "num_key_value_heads":  # which transformers 4 takes for as many as query heads
            heads = at(config, (*path[:-1], "num_attention_heads"))
            assert found == ours(changed(config, path, heads)), f"{name}: {path} null"
        elif field in NULL_IS_ABSENT or path == around_text:
            assert found == ours(changed(config, path)), f"{name}: {path} null"
        elif full is None or field not in NULL_HAS_A_MEANING:
            assert found == ours(changed(config, path, False)), f"{name}: {path} null"  # as the code takes it
        compared += 1
    return compared


def check_types(config: Config) -> int:
    """How many files with a list where another value stands are refused; others say nothing of the model."""
    understood, refused = ours(config), 0
    for path in paths(config):
        value = [] if not isinstance(at(config, path), list) else {"a": 1}
        found = ours(changed(config, path, value)) if path != ("architectures",) else None
        assert found in (None, understood), f"{path} of another type"
        refused += found is None
    return refused


@pytest.fixture(autouse=True)
def quiet():
    """transformers warns of the odd files."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", families.MODELS)
def test_a_field_left_out_or_null_means_what_transformers_takes_it_for(name):
    config_class, _ = families.MODELS[name]
    config = json.loads(families.config(name).to_json_string(use_diff=False))
    config |= {"architectures": families.published(name)["architectures"]}
    assert check(name, config_class, config) >= 9 and check_types(config) >= 9
    for layers in 10_001, 10**400:
        assert ours(config | {"num_hidden_layers": layers}) is None


@pytest.mark.parametrize("name", WRAPPED)
def test_within_a_multimodal_model(name):
    config_class, architecture, vision, more = WRAPPED[name]
    inner = families.config(name, **({"pad_token_id": 0} if name.startswith("gemma-4") else {})).to_dict()
    whole = config_class(text_config=inner, vision_config=vision, **more)
    config = json.loads(whole.to_json_string()) | {"architectures": [architecture]}
    assert check(name, config_class, config) >= 5 and check_types(config) >= 5


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    (("mistral", 16, 8), ("mixtral", 24, 8), ("ministral-3", 32, 8), ("llama", 4, 4), ("deepseek-v3", 128, 128),
     ("mistral-4", 32, 32), ("glm-4.7-flash", 20, 20)),
)  # fmt: skip
def test_key_value_heads_that_are_left_out(name, heads, kv_heads):
    """Where the class's own number fits the query heads: of the tiny models it does not."""
    config_class, _ = families.MODELS[name]
    found = families.config(name, num_attention_heads=heads, num_key_value_heads=kv_heads)
    config = json.loads(found.to_json_string(use_diff=False))
    config = changed(config | {"architectures": families.published(name)["architectures"]}, ("num_key_value_heads",))
    arch = ours(config)
    assert (
        arch is not None
        and arch == ours(theirs(config_class, config) or {})
        and arch.attentions[0].kv_heads == kv_heads
    )
