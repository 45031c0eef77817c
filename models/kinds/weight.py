"""A weight: its Megatron-Core name and shape, and the Hugging Face tensors that it is made of."""

from dataclasses import dataclass

from isoloss.models.kinds.mappings import ParamMapping

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, or one row of dim 0 of a tensor that holds the same thing for every expert.

    shape: shape of the part.
    row, rows: index of the row and number of rows; None for a whole tensor.
    """

    tensor: str
    shape: Shape
    row: int | None = None
    rows: int | None = None

    @property
    def tensor_shape(self) -> Shape:
        return self.shape if self.rows is None else (self.rows, *self.shape)


@dataclass(frozen=True)
class Weight:
    """A Megatron-Core parameter (or, for `trained=False`, buffer).

    name: its global name in GPTModel.
    shape: shape before tensor parallelism, vocabulary at its true size.
    parts: Hugging Face tensors, in the order that `mapping.merge` takes them.
    layer, expert: index of the weight's layer and expert, or None.
    trained: False for the experts' selection bias and the scalar of a layer, which no gradient reaches and which are
        always float32.
    """

    name: str
    shape: Shape
    parts: tuple[Part, ...]
    mapping: ParamMapping
    layer: int | None = None
    expert: int | None = None
    trained: bool = True
