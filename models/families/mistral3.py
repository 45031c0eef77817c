"""Mistral Small 3.1 and 3.2 and Ministral 3 as the hub has them: a text model of Mistral or Ministral 3 inside of a
multimodal one, whose vision tower is left out.

Source: transformers, models/mistral3/modeling_mistral3.py. Files that say nothing of `tie_word_embeddings` are those of
Mistral Small, which has an output projection of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from isoloss.models.architecture import Architecture
from isoloss.models.families import ministral3, mistral
from isoloss.models.families.hf_config import text_config
from isoloss.models.families.hf_fields import ConfigJson, refuse

TEXT: Mapping[str, tuple[Callable[[ConfigJson], Architecture], str]] = {
    "mistral": (mistral.architecture, "MistralForCausalLM"),
    "ministral3": (ministral3.architecture, "Ministral3ForCausalLM"),
}
VISION = frozenset({
    "image_token_index", "projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size",
    "vision_feature_layer",
})  # fmt: skip
BESIDE = ("vision_tower.", "multi_modal_projector.")


def architecture(config: ConfigJson) -> Architecture:
    text = text_config(config, "mistral3", irrelevant=VISION)
    name = text.get("model_type", "mistral")
    if not isinstance(name, str) or name not in TEXT:
        refuse("text_config.model_type", name, f"is not supported within mistral3; one of {', '.join(TEXT)} is")
    read, text_class = TEXT[name]
    return replace(
        read(text),
        tensor_prefix="language_model.model.",
        head_prefix="language_model.",
        text_class=text_class,
        left_out=(*BESIDE, *(f"model.{each}" for each in BESIDE)),
    )
