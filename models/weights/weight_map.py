"""The weight map: every weight of a model, by its Megatron-Core name and by its Hugging Face names.

One map serves loading, exporting, gradients and the checkpoint converter, so they cannot disagree. Names are global
(layers and experts counted over the whole model, not within a rank) and follow Megatron-Core's local layer spec;
`checkpoint_names` has their names in a checkpoint. The weights of a layer follow from its kinds (`models/kinds`).
"""

import math

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.mappings import ParamMapping, Replicated, RowParallel, Vocabulary
from isoloss.models.kinds.weight import Part, Shape, Weight

LM_HEAD = "lm_head.weight"
OUTPUT = "output_layer.weight"
VALUE_HEAD = "score.weight"  # what transformers calls the head of its classifiers


def weight_map(arch: Architecture) -> tuple[Weight, ...]:
    """Every weight of the model, in model order. A tied output projection is not a weight of its own."""
    hidden, vocabulary = arch.hidden_size, Vocabulary(arch.vocab_size)
    table: Shape = (arch.vocab_size, hidden)
    weights = [_whole("embedding.word_embeddings.weight", embedding_name(arch), table, vocabulary)]
    for layer in range(arch.num_layers):
        weights += arch.layers[layer].weights(arch.place(layer))
    weights.append(
        _whole("decoder.final_layernorm.weight", f"{arch.tensor_prefix}norm.weight", (hidden,), Replicated())
    )
    if arch.critic:
        weights.append(_whole("output_layer.weight", VALUE_HEAD, (1, hidden), RowParallel()))
    elif not arch.tie_embeddings:
        weights.append(output_matrix(arch))
    return tuple(weights)


def output_matrix(arch: Architecture) -> Weight:
    """Return the output projection, also where it is tied and thus no weight of the map."""
    return _whole(OUTPUT, output_name(arch), (arch.vocab_size, arch.hidden_size), Vocabulary(arch.vocab_size))


def embedding_name(arch: Architecture) -> str:
    """Return the name of the embedding in Hugging Face files."""
    return f"{arch.tensor_prefix}embed_tokens.weight"


def output_name(arch: Architecture) -> str:
    """Return the name of the output projection in Hugging Face files."""
    return arch.head_prefix + LM_HEAD


def hf_shapes(weights: tuple[Weight, ...]) -> dict[str, Shape]:
    """The Hugging Face tensors that these weights are made of, in the order of the map."""
    return {part.tensor: part.tensor_shape for weight in weights for part in weight.parts}


def num_parameters(arch: Architecture) -> int:
    """Number of weights, each counted once: a tied output projection adds nothing, vocabulary padding is left out."""
    return sum(math.prod(weight.shape) for weight in weight_map(arch) if weight.trained)


def _whole(name: str, hf_name: str, shape: Shape, mapping: ParamMapping) -> Weight:
    return Weight(name, shape, (Part(hf_name, shape),), mapping)
