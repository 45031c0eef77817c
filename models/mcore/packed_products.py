"""The matrices of a model that generates on a CPU, laid out for products of few rows."""

from contextlib import AbstractContextManager

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from isoloss.models.mcore import patches
from isoloss.models.mcore.gpt import PackedGPT
from isoloss.parallel.packed_matrix import PackedMatrix


class PackedProducts:
    """Of the weights as they are now, which takes as much memory again. Those of experts are left out."""

    def __init__(self, module: PackedGPT, rows: int):
        """rows: that decode together."""
        self._layers = {
            layer: PackedMatrix(layer.weight, rows)
            for layer in module.decoder.modules()
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.weight is not None
        }
        self.head = PackedMatrix(module.output_weight(), rows)

    @staticmethod
    def serve(module: PackedGPT) -> bool:
        return PackedMatrix.serves(module.output_weight()) and module.pg_collection.tp.size() == 1

    def in_layers(self) -> AbstractContextManager[None]:
        """What the layers multiply by meanwhile."""
        return patches.multiply_by(self._layers)
