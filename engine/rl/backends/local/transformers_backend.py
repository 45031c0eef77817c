"""The rollout backend of a transformers model in every training process."""

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from isoloss.engine.rl.backends.local.base import LocalBackend
from isoloss.engine.rl.backends.local.transformers_decoder import TransformersDecoder
from isoloss.engine.rl.backends.protocol import Bucket, Receives
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder, read_architecture, read_config
from isoloss.models.weights.weight_map import LM_HEAD, hf_shapes, output_name, weight_map


class TransformersBackend(LocalBackend):
    """A whole copy of the model on every rank, in addition to the trainer's, for every layout of the trainer.

    folder: a Hugging Face folder or a checkpoint; only its config.json is read, weights come through `update_weights`.
    For small models: on a GPU the copy stays there while the trainer trains, however little the layout leaves there.

    concurrency: rows that decode together on this rank.
    dtype: type of the weights of the copy.
    tokenizer: folder of the tokenizer, for stop strings; None: `folder`.
    Collective over the world.
    """

    receives: Receives = "every rank"

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        concurrency: int,
        tokenizer: str | Path | None = None,
    ):
        super().__init__(read_architecture(folder), concurrency, hf_folder(tokenizer or folder))
        self.model = build(hf_folder(folder), self.arch, dtype, device)
        self._slots = slots(self.model, self.arch)

    def decoder(self) -> TransformersDecoder:
        return TransformersDecoder(self.model)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """Implement `RolloutBackend.update_weights`; tensors are copied, and rounded where `dtype` is narrower.

        Raises ValueError where a tensor is missing, unknown, of another shape, or comes twice.
        """
        self._version = None
        missing = set(self._slots)
        for bucket in buckets:
            for name, tensor in bucket:
                if name not in missing:
                    raise ValueError(
                        f"{name} {'came twice' if name in self._slots else 'is not a tensor of the model'}"
                    )
                slot = self._slots[name]
                if slot.shape != tensor.shape:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}, the model's has {list(slot.shape)}")
                slot.copy_(tensor)
                missing.remove(name)
        if missing:
            raise ValueError(f"{min(missing)} is missing ({len(missing)} of {len(self._slots)} tensors are)")
        self._version = version

    def close(self) -> None:
        """Implement `RolloutBackend.close`: free the model's memory."""
        super().close()
        self._slots.clear()
        nn.Module.to(self.model, device="meta")


def build(folder: Path, arch: Architecture, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of config.json with uninitialised weights; rotary frequencies, which are not weights, are computed."""
    # Grouped matrix products, the default for experts, know no fp64 and want rows of whole 16 bytes.
    sizes = (arch.hidden_size, arch.experts.intermediate_size) if arch.experts else ()
    grouped = dtype != torch.float64 and all(size * dtype.itemsize % 16 == 0 for size in sizes)
    options = {} if grouped else {"experts_implementation": "eager"}
    with no_init_weights(), torch.device(device):
        config = _config(folder, arch).get_text_config()
        config.tie_word_embeddings = arch.tie_embeddings  # of a multimodal model it may stand next to the text model's
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # transformers 5.23 has Mistral 4's class and not its entry
            name = read_config(folder)["architectures"][0]
            AutoModelForCausalLM.register(type(config), getattr(transformers, name), exist_ok=True)
        # A file may name a kernel for attention, which transformers would download and run: None is its own choice.
        own = {"trust_remote_code": False, "attn_implementation": None}
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **own, **options)
    model.tie_weights()  # part of the initialisation that was left out
    for weight in weight_map(arch):
        # The experts' selection bias: rounded to bf16 it would choose other experts. A layer's scalar is rounded.
        if not weight.trained and weight.name.endswith("expert_bias"):
            module, _, name = _transformers_name(weight.parts[0].tensor, arch).rpartition(".")
            owner = model.get_submodule(module)
            setattr(owner, name, getattr(owner, name).float())
    return model.eval()


def _config(folder: Path, arch: Architecture) -> PreTrainedConfig:
    """Return the configuration in transformers' own class. Its name is that of the family, also where config.json names
    a class of the code in the model's folder (Kimi-K2)."""
    written = read_config(folder)
    if written.get("model_type") in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return CONFIG_MAPPING[arch.family].from_dict({**written, "model_type": arch.family})


def slots(model: PreTrainedModel, arch: Architecture) -> dict[str, Tensor]:
    """Return the place of each Hugging Face tensor: views that cover all parameters of the model.

    transformers joins the experts of a layer in memory, though not in files: gate_up_proj [experts, 2 wide, hidden] and
    down_proj [experts, hidden, wide].
    """
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for weight in weight_map(arch):
        names = [part.tensor for part in weight.parts]
        if weight.expert is None or weight.parts[0].rows is not None:
            views = [state[_transformers_name(name, arch)] for name in names]
        else:
            joined = "gate_up_proj" if len(names) == 2 else "down_proj"
            views = state[f"model.layers.{weight.layer}.mlp.experts.{joined}"][weight.expert].chunk(len(names))
        tensors |= zip(names, views)
    for tensor, shape in hf_shapes(weight_map(arch)).items():
        assert tensors[tensor].shape == shape, (tensor, shape, tensors[tensor].shape)
    if arch.tie_embeddings:
        del state[LM_HEAD]  # the same memory as the embedding
    assert sum(t.numel() for t in tensors.values()) == sum(t.numel() for t in state.values())
    return tensors


def _transformers_name(tensor: str, arch: Architecture) -> str:
    """Return the name that transformers has in memory for a tensor of the files; some families have two names."""
    if tensor == output_name(arch):
        return LM_HEAD
    if tensor.startswith(arch.tensor_prefix):
        tensor = "model." + tensor.removeprefix(arch.tensor_prefix)
    for sinks in {kind.sinks for kind in arch.attentions} - {""}:
        tensor = tensor.replace(f".self_attn.{sinks}", ".self_attn.sinks")
    return tensor.replace(f".{arch.experts.names.module}.", ".mlp.") if arch.experts else tensor
