"""The description of a decoder-only transformer, apart from its weights, that every builder reads.

Families (families/llama.py, ...) make an `Architecture` from a Hugging Face config.json. All of them share RMSNorm
before attention and MLP. What differs between layers is a `Layer`, and what follows from it is in `models/kinds`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from isoloss.models.kinds.experts import Experts
from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.models.kinds.kind import MLP, Attention, Kind, Place
from isoloss.models.kinds.layer import Layer
from isoloss.models.rope import Rope

# Fields of config.json for the layers that files append for multi-token prediction: four spellings.
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer.

    zero_centered_norm: every RMSNorm multiplies by 1 + its weight, but that inside of Gated DeltaNet.
    scaled_embedding: embeddings are multiplied by sqrt(hidden_size), rounded to the type of the weights.
    logit_softcap: logits z become c tanh(z / c).
    tie_embeddings: the output projection is the embedding matrix.
    max_positions: longest sequence that the model was made for.
    dtype: "float32", "bfloat16" or "float16": the type the weights were published in.
    critic: the output projection has one row, which gives an expected return instead of logits (`as_critic`).
    tensor_prefix, head_prefix: prefixes in Hugging Face files of the model's tensors and of the output projection.
    text_class: class in config.json of a multimodal model's text model where it stands alone.
    left_out: beginnings of the names of other tensors that files may hold, such as those of a vision tower, which take
        no part in what the model computes and are not trained.
    mtp_layers: layers for multi-token prediction that files append after the last one. They take no part in what the
        model computes and are not trained.
    """

    family: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    dtype: str
    zero_centered_norm: bool = False
    scaled_embedding: bool = False
    logit_softcap: float | None = None
    tensor_prefix: str = "model."
    head_prefix: str = ""
    text_class: str = field(default="", compare=False)
    left_out: tuple[str, ...] = field(default=(), compare=False)
    mtp_layers: int = 0
    critic: bool = field(default=False, repr=False)

    def text_only(self) -> "Architecture":
        """The same model without the prefixes of a multimodal one: tensors have the names of a stand-alone text
        model."""
        return replace(self, tensor_prefix="model.", head_prefix="")

    def as_critic(self) -> "Architecture":
        return replace(self, critic=True, tie_embeddings=False)

    def with_layers(self, change: Callable[[Layer], Layer]) -> "Architecture":
        return replace(self, layers=tuple(map(change, self.layers)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Return the hash, which a search over layouts asks for at every candidate: layers are many."""
        return hash((self.family, self.layers, self.hidden_size, self.vocab_size, self.tie_embeddings))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def place(self, layer: int) -> Place:
        return Place(layer, self.hidden_size, self.tensor_prefix)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Each kind of attention once, those that see most tokens by a softmax first."""
        found = dict.fromkeys(layer.attention for layer in self.layers)
        return tuple(sorted(found, key=lambda kind: (isinstance(kind, GatedDelta), kind.window is not None)))

    @cached_property
    def mlps(self) -> tuple[MLP, ...]:
        """Each kind of MLP once."""
        return tuple(dict.fromkeys(layer.mlp for layer in self.layers))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (*self.attentions, *self.mlps)

    @cached_property
    def experts(self) -> Experts | None:
        """Return the experts of the layers that have any; all such layers have the same."""
        return next((layer.mlp.experts for layer in self.layers if layer.mlp.experts), None)

    @cached_property
    def sparse(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        return tuple(layer.mlp.experts is not None for layer in self.layers)

    @cached_property
    def linear(self) -> tuple[bool, ...]:
        """For each layer, whether its attention is linear: Gated DeltaNet."""
        return tuple(isinstance(layer.attention, GatedDelta) for layer in self.layers)

    @cached_property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """Each rotation once, with the channels that it turns."""
        return tuple(dict.fromkeys((kind.rope, kind.rotary_dim) for kind in self.attentions if kind.rope))

    @cached_property
    def layers_differ(self) -> bool:
        """Return whether layers differ in the names or shapes of their weights."""
        first = self.place(0)
        held = {tuple((w.name, w.shape) for w in layer.weights(first)) for layer in dict.fromkeys(self.layers)}
        return len(held) > 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]
