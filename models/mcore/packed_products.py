"""The matrices of a model that generates on a CPU, laid out for products of few rows."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from isoloss.models.mcore.gpt import PackedGPT
from isoloss.parallel.packed_matrix import PackedMatrix


class PackedProducts:
    """Of the weights as they are now, which takes as much memory again. Those of experts are left out."""

    def __init__(self, module: PackedGPT, rows: int):
        """rows: that decode together."""
        linears = (m for m in module.decoder.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear))
        self._layers = {linear: PackedMatrix(linear.weight, rows) for linear in linears}
        self.head = PackedMatrix(module.output_weight(), rows)

    @staticmethod
    def serve(module: PackedGPT) -> bool:
        return PackedMatrix.serves(module.output_weight()) and module.pg_collection.tp.size() == 1

    @contextmanager
    def in_layers(self) -> Iterator[None]:
        """What the layers multiply by."""
        for linear, matrix in self._layers.items():
            linear._forward_impl = _product_with(matrix)
        try:
            yield
        finally:
            for linear in self._layers:
                del linear._forward_impl


def _product_with(matrix: PackedMatrix):
    def product(input: Tensor, bias: Tensor | None, **_: object) -> Tensor:
        return matrix.product(input, bias)

    return product
