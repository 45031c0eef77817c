"""A frozen model under adapters, of which it computes with one at a time."""

from weakref import WeakKeyDictionary

from isoloss.models.lora.layer import LayerAdapter
from isoloss.models.model import Model


class Slot:
    """The adapters of one linear layer."""

    def __init__(self, frozen: "FrozenModel"):
        self._frozen = frozen
        self._layer_of: WeakKeyDictionary[object, LayerAdapter] = WeakKeyDictionary()  # by its adapter

    def put(self, adapter: object, layer: LayerAdapter) -> None:
        self._layer_of[adapter] = layer

    @property
    def active(self) -> LayerAdapter | None:
        """Return what the layer multiplies by in addition to its weight; None for nothing."""
        current = self._frozen.current
        return None if current is None else self._layer_of.get(current)


class FrozenModel:
    """A model whose own weights are not trained.

    digest: digest of the weights, once it was computed.
    current: the adapter that the model computes with; None: the model alone.
    """

    def __init__(self, model: Model):
        """Freeze the model's parameters."""
        self.model, self.digest = model, ""
        self.current: object | None = None
        for tensor in model.tensors():
            tensor.requires_grad_(False)
        self.module_of = {  # by the identity of the weight
            id(module._parameters.get("weight")): module for chunk in model.modules for module in chunk.modules()
        }
        self.chunk_of = {
            id(parameter): index for index, chunk in enumerate(model.modules) for parameter in chunk.parameters()
        }
