"""Read the folder of an adapter that PEFT or isoloss wrote: the factors of every matrix that it adapts.

Factors are found by the names of the model's files, of its modules in transformers, or of PEFT's ParamWrapper, which
holds those of all experts of a layer together. Only headers are read before a factor is asked for.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.weight import Part, Weight
from isoloss.models.lora.factors import is_turned, leaves
from isoloss.models.lora.peft_config import CONFIG, read_config
from isoloss.models.lora.peft_folder import TENSORS
from isoloss.models.weights.finite import check_finite
from isoloss.models.weights.manifest import IS_A_POINTER, is_pointer
from isoloss.models.weights.mmap import DTYPES, fetch, safetensors_views
from isoloss.models.weights.weight_map import embedding_name, output_matrix, weight_map
from isoloss.parallel.runtime.errors import UserError

# An engine in fp64 exports factors in fp64.
FACTOR_DTYPES = {**DTYPES, "F64": torch.float64}
PREFIX = "base_model.model."
_KEY = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<letter>[AB])\.weight")
_JOINED = re.compile(r"(?P<prefix>.*\.)layers\.(?P<layer>\d+)\.(mlp\.|block_sparse_moe\.)?experts(\.base_layer)?")
Place = tuple[str, int | None]  # a Hugging Face tensor; for one of all experts also the row
_AGAIN = "export or copy the adapter again"


@dataclass(frozen=True)
class Pair:
    """The factors of a matrix: a [r, in] and b [out, r], views of a mapped file. scale: factor of their product."""

    module: str
    a: Tensor
    b: Tensor
    scale: float


class AdapterFolder:
    """An adapter of a model in PEFT's form.

    pairs: factors of every adapted matrix, by its place in the model's files.

    Raises UserError where the adapter is of a variant that is not plain LoRA, is not one of this model, adapts the
    embedding, lacks a tensor, or its files are damaged.
    """

    def __init__(self, folder: str | Path, arch: Architecture):
        folder = Path(folder)
        self.config, self.path = read_config(folder), folder / TENSORS
        self._views = _open(self.path)
        self._weights = weight_map(arch)
        self._places = _places(arch)
        self._head = {embedding_name(each) for each in (arch, arch.text_only())}
        self.pairs: dict[Place, Pair] = {}
        for module, (a, b) in self._modules().items():
            for place, pair in self._pairs_of(module, a, b):
                if place in self.pairs:
                    raise UserError(
                        f"{self.path} adapts {place[0]} twice, as {self.pairs[place].module} and {module}: keep one"
                    )
                self.pairs[place] = pair
        self._check_complete()

    def factor(self, place: Place, letter: str) -> Tensor:
        """Return a factor of a matrix, in the type of the file. Raises UserError where it is not finite."""
        pair = self.pairs[place]
        numbers = fetch(pair.a if letter == "A" else pair.b, self.path)
        check_finite(numbers, f"lora_{letter} of {pair.module}", self.path)
        return numbers

    def _modules(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return both factors of every module that PEFT adapts, by its name in the model."""
        found = dict[str, dict[str, Tensor]]()
        for key, tensor in self._views.items():
            match = _KEY.fullmatch(key)
            if match is None:
                of_head = any(name.removesuffix(".weight") in key for name in self._head)
                what = "of an embedding" if of_head else _what(key)
                raise UserError(f"{self.path} holds {key}, which is {what}: merge the adapter with PEFT instead")
            if tensor.ndim != 2:
                raise UserError(f"{self.path}: {key} has {tensor.ndim} dimensions where a factor has 2; {_AGAIN}")
            found.setdefault(match["module"], {})[match["letter"]] = tensor
        for module, factors in found.items():
            for letter in "AB":
                if letter not in factors:
                    raise UserError(f"{self.path} lacks {PREFIX}{module}.lora_{letter}.weight; {_AGAIN}")
        if not found:
            raise UserError(f"{self.path} holds no tensor; {_AGAIN}")
        return {module: (factors["A"], factors["B"]) for module, factors in found.items()}

    def _pairs_of(self, module: str, a: Tensor, b: Tensor) -> Iterator[tuple[Place, Pair]]:
        place = self._places.get(module)
        if place is not None:
            weight, part = place
            yield (part.tensor, None), self._checked(module, module, _sizes(weight, part), a, b)
            return
        joined = _JOINED.fullmatch(module)
        if joined is not None:
            yield from self._of_experts(module, int(joined["layer"]), a, b)
        elif f"{module}.weight" in self._head:
            raise UserError(
                f"{self.path} adapts {module}, an embedding, of which isoloss reads no adapters: "
                "merge the adapter with PEFT instead"
            )
        else:
            raise UserError(
                f"{self.path} adapts {module}, which the model does not have as a matrix of its own: the adapter is of "
                "another model, or of a part that isoloss does not read"
            )

    def _of_experts(self, module: str, layer: int, a: Tensor, b: Tensor) -> Iterator[tuple[Place, Pair]]:
        """Yield the factors of each expert of a layer. A has the experts one below the other, B has them innermost.

        PEFT has gate and up as one matrix. Where the model's files have them apart, both get its A, and each its rows
        of B.
        """
        matrices = dict[str, list[Weight]]()
        for weight in self._weights:
            if weight.layer == layer and weight.expert is not None and weight.name.endswith(".weight"):
                matrices.setdefault("gate_up_proj" if "linear_fc1" in weight.name else "down_proj", []).append(weight)
        for name, weights in matrices.items():
            sizes = [_sizes(weights[0], part) for part in weights[0].parts]
            outputs, inputs = sum(out for out, _ in sizes), sizes[0][1]
            if (len(b), a.shape[1], b.shape[1]) != (outputs, inputs, len(a)) or len(a) % len(weights):
                continue  # only one of the two fits: gate_up_proj has twice as many outputs as down_proj has inputs
            of_a, of_b = a.unflatten(0, (len(weights), -1)), b.unflatten(1, (-1, len(weights)))
            called = f"{module.removesuffix('.base_layer')}.{name}"
            for expert, weight in enumerate(weights):
                rows = of_b[..., expert].split([out for out, _ in sizes])
                for part, size, own in zip(weight.parts, sizes, rows, strict=True):
                    yield (part.tensor, part.row), self._checked(module, called, size, of_a[expert], own)
            return
        raise UserError(
            f"{self.path}: {module} has factors of shapes {list(a.shape)} and {list(b.shape)}, which are none of the "
            f"experts of layer {layer}: the adapter is of another model"
        )

    def _checked(self, module: str, called: str, size: tuple[int, int], a: Tensor, b: Tensor) -> Pair:
        """called: the name that patterns of ranks and alphas are matched with. size: outputs and inputs."""
        rank = self.config.rank_of(called)
        wanted = [rank, size[1]], [size[0], rank]
        if (list(a.shape), list(b.shape)) != wanted:
            raise UserError(
                f"{self.path}: the factors of {called} have shapes {list(a.shape)} and {list(b.shape)} where the model "
                f"and {CONFIG} call for {wanted[0]} and {wanted[1]}: the adapter is of another model, or damaged"
            )
        return Pair(module, a, b, self.config.scale_of(called))

    def _check_complete(self) -> None:
        """Check that what `target_modules` names is there, and all experts of a layer where there are some."""
        of_matrix = dict[tuple[int | None, str], set[bool]]()
        for weight in self._weights:
            if weight.expert is not None and weight.name.endswith(".weight"):
                for index, part in enumerate(weight.parts):
                    matrix = weight.layer, f"{weight.name.rsplit('.', 2)[1]} part {index}"
                    of_matrix.setdefault(matrix, set()).add((part.tensor, part.row) in self.pairs)
        for (layer, _), has in of_matrix.items():
            if len(has) > 1:
                raise UserError(f"{self.path} adapts some experts of layer {layer} and not all of them; {_AGAIN}")
        # Names of matrices that experts have too may mean those of experts alone, as PEFT takes them.
        of_experts = {leaf for weight in self._weights if weight.expert is not None for leaf in leaves(weight)}
        for module, (weight, part) in self._places.items():
            named = any(module == target or module.endswith(f".{target}") for target in self.config.targets)
            named = named and module.rsplit(".", 1)[-1] not in of_experts
            if named and weight.expert is None and (part.tensor, None) not in self.pairs:
                raise UserError(
                    f"{self.path} lacks the factors of {module}, which target_modules of {CONFIG} names; {_AGAIN}"
                )


def _places(arch: Architecture) -> dict[str, tuple[Weight, Part]]:
    """Return every matrix of the layers, and the output matrix, by its module's name. Of a multimodal model the names
    of its text model alone are known too, by which isoloss exports."""
    found = dict[str, tuple[Weight, Part]]()
    outputs = [] if arch.critic else [(output_matrix(arch), output_matrix(arch.text_only()))]
    of_layers = zip(weight_map(arch), weight_map(arch.text_only()), strict=True)
    for weight, as_text in (*(pair for pair in of_layers if pair[0].layer is not None), *outputs):
        for part, named in zip(weight.parts, as_text.parts, strict=True):
            if part.row is None and len(part.shape) == 2 and part.tensor.endswith(".weight"):
                found[part.tensor.removesuffix(".weight")] = weight, part
                found[named.tensor.removesuffix(".weight")] = weight, part
    return found


def _sizes(weight: Weight, part: Part) -> tuple[int, int]:
    """Return outputs and inputs of a matrix."""
    first, second = part.shape
    return (second, first) if is_turned(weight.mapping) else (first, second)


def _open(path: Path) -> Mapping[str, Tensor]:
    """Return views of the file's tensors. Raises UserError where it is missing, damaged, or holds other types."""
    if not path.is_file():
        others = sorted(each.name for each in path.parent.glob("adapter_model.*"))
        raise UserError(
            f"{path} is missing"
            + (f": convert {others[0]} to safetensors, as PEFT's save_pretrained does" if others else f"; {_AGAIN}")
        )
    try:
        with safe_open(path, framework="pt") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in set(file.keys())}
    except (SafetensorError, OSError) as error:
        if is_pointer(path):
            raise UserError(f"{path} {IS_A_POINTER}") from None
        raise UserError(f"{path} is not a safetensors file, or cut short ({error}); {_AGAIN}") from None
    for name, kind in kinds.items():
        if kind not in FACTOR_DTYPES:
            raise UserError(f"{path}: {name} has the type {kind}; only {', '.join(FACTOR_DTYPES)} are read")
    return safetensors_views(path, FACTOR_DTYPES)


def _what(key: str) -> str:
    """Return what a tensor is that is no factor of a matrix."""
    for sign, what in (
        ("lora_magnitude_vector", "of DoRA"),
        (".bias", "a bias, trained beside the adapter"),
        ("token_adapter", "of rows of the embedding"),
        (".lora_", "no factor that isoloss knows"),
    ):
        if sign in key:
            return what
    return "a copy of the model's own tensor (modules_to_save), or of another kind of adapter"
