"""The matrices of a model that generates on a CPU, laid out for products of few rows."""

from contextlib import AbstractContextManager

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from isoloss.models.mcore import patches
from isoloss.models.model import Model
from isoloss.parallel.packed_matrix import PackedMatrix


class PackedProducts:
    """Of the weights as they are now, which takes as much memory again. Those of experts are left out.

    head: the output matrix, on the last stage.
    """

    def __init__(self, model: Model, rows: int):
        """rows: that decode together."""
        self._layers = {
            layer: PackedMatrix(layer.weight, rows)
            for module in model.modules
            for layer in module.decoder.modules()
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.weight is not None
        }
        last = model.modules[-1]
        self.head = PackedMatrix(last.output_weight(), rows) if last.post_process else None

    @staticmethod
    def serve(model: Model) -> bool:
        return PackedMatrix.serves(model.tensors()[0]) and model.mesh.tp.size() == 1

    def in_layers(self) -> AbstractContextManager[None]:
        """What the layers multiply by meanwhile."""
        return patches.multiply_by(self._layers)
