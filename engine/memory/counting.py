"""Count what one layer of each kind, the embedding and the loss head keep and add in a training step: the real modules,
on tensors that have shapes and no values, as one rank of a world that is not there.

That changes torch, so `layers_of` and `head_of` ask another process, unless this one already simulates a rank.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.memory import counting_process, nowhere
from isoloss.engine.memory.live_bytes import LiveBytes, aten, tensors_in
from isoloss.models.architecture import Architecture
from isoloss.models.lora.adapter import Adapter
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import present
from isoloss.models.lora.frozen import FrozenModel
from isoloss.models.mcore.activation_memory import ActivationMemory
from isoloss.models.mcore.build import accumulate_in_products
from isoloss.models.mcore.gpt import forward_row
from isoloss.models.mcore.kernels import Kernels
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.moe.dispatch import Bound
from isoloss.models.mcore.moe.experts import RoutedRow
from isoloss.models.mcore.moe.router_losses import RoutedTokens
from isoloss.models.model import Model
from isoloss.parallel import Layout, Mesh
from isoloss.parallel.mesh import make_gather_buffer


@dataclass(frozen=True)
class Setting:
    """Everything on which the bytes of a part of a model depend, apart from its tokens.

    arch: a model with one layer of each kind.
    layout: tensor, context and expert parallelism, on the fewest ranks.
    dtype, grad_dtype: types of weights and of the buffer of gradients.
    accumulates: matrix products add to that buffer themselves.
    dispatch_bound: moe.dispatch_bound.
    lora: keys of the adapter, under which the model is frozen; rank 0: none.
    """

    arch: Architecture
    layout: Layout
    memory: ActivationMemory
    kernels: Kernels
    dtype: torch.dtype
    grad_dtype: torch.dtype
    accumulates: bool
    dispatch_bound: float | None
    lora: LoraConfig


@dataclass(frozen=True)
class Counted:
    """Bytes of a part of a model on a rank.

    kept: bytes that stay from the forward of the part until its backward.
    levels: live bytes after every change in the forward of the part, and in its backward, when later parts keep nothing
        more; above the bytes that were live before the part.
    """

    kept: int
    levels: np.ndarray


class Layer(NamedTuple):
    """A layer: attention, with its norm; and the MLP, with the norm behind the layer that is merged with it."""

    attention: Counted
    mlp: Counted


class Layers(NamedTuple):
    """embedding: with what is made for a row before the layers."""

    embedding: Counted
    layers: Sequence[Layer]


def count_layers(setting: Setting, tokens: Sequence[int]) -> list[Layers]:
    """Count the embedding and a layer of each kind for these numbers of tokens on a rank."""
    with _model(setting, max(tokens)) as (model, marks):
        chunk = model.modules[0]
        for index, layer in enumerate(chunk.decoder.layers):
            _mark_start(marks, layer, ("attention", index))
            _mark_start(marks, layer.mlp, ("mlp", index))
            _mark_end(marks, layer, ("end", index))
        return [_count_pass(model, setting, number, marks) for number in tokens]


def _count_pass(model: Model, setting: Setting, tokens: int, marks: "_Marks") -> Layers:
    marks.begin()
    ids = torch.zeros(tokens, dtype=torch.int64, device=nowhere.DEVICE)
    routed, bound = _routed(model, setting, ids)
    row = RoutedRow(lengths=(tokens * setting.layout.context,), tokens=routed, bound=bound)
    total = forward_row(model.modules[0], ids, ids, row).sum()
    total.backward()
    marks("done")
    layers = []
    for index in range(setting.arch.num_layers):
        attention, mlp, end = (("attention", index), ("mlp", index), ("end", index))
        layers.append(
            Layer(
                marks.counted(attention, mlp, ("gradient", mlp), ("gradient", attention)),
                marks.counted(mlp, end, ("gradient", end), ("gradient", mlp)),
            )
        )
    first = ("attention", 0)
    return Layers(marks.counted("begin", first, ("gradient", first), "done"), layers)


def count_head(setting: Setting, tokens: int) -> Counted:
    """Count final norm and loss head, where every token is a target. Kept is the part of a tied embedding's gradient
    that autograd holds until it has the other, at the end of the backward."""
    one_layer = replace(setting, arch=replace(setting.arch, layers=setting.arch.layers[:1]))
    with _model(one_layer, tokens, forgets=not setting.arch.tie_embeddings) as (model, marks):
        shards = model.mesh.tp.size() if model.mesh.layout.sequence_parallel else 1
        shape = (tokens // shards, 1, model.arch.hidden_size)
        hidden = torch.empty(shape, dtype=model.dtype, device=nowhere.DEVICE, requires_grad=True)
        ids = torch.zeros(tokens, dtype=torch.int64, device=nowhere.DEVICE)
        marks.begin()
        norm: Any = model.modules[0].decoder.final_layernorm
        normed = norm(hidden)
        if model.arch.critic:
            loss = model.values(normed, ids).sum()
        else:
            loss = model.logprobs(normed, ids, ids)[0].sum()
        del normed
        marks("turn")
        loss.backward()
        hidden.grad = None
        marks("done")
        head = marks.counted("begin", "turn", "turn", "done")
    return replace(head, kept=int(head.levels[-1]))


@contextlib.contextmanager
def _model(setting: Setting, tokens: int, *, forgets: bool = True) -> Iterator[tuple[Model, "_Marks"]]:
    """Build a model on a rank of its own world, as a step finds it. tokens: most of a row. forgets: whether the
    gradients that autograd brings to weights are dropped, as by Megatron's DistributedDataParallel."""
    counter, arch = _Remembering("meta"), setting.arch
    nowhere.join(counter, nowhere.SimulatedRank(0, setting.layout.world_size))
    nowhere.share_evenly(arch)
    mesh = Mesh.create(setting.layout)
    with nowhere.without_values(counter):
        options = BuildOptions(setting.memory, setting.kernels)
        model = Model.build(arch, mesh, setting.dtype, (arch.num_layers,), options)
        if setting.accumulates:
            accumulate_in_products(model.modules)
        for parameter in _trained(model, setting.lora):
            _give_main_grad(parameter, setting.grad_dtype, forgets=forgets)
        if setting.layout.sequence_parallel:
            make_gather_buffer(tokens, arch.hidden_size, setting.dtype)
        yield model, _Marks(counter)


def _trained(model: Model, lora: LoraConfig) -> Iterator[Tensor]:
    """Yield the parameters that are trained: the model's, or those of an adapter, which the model then computes with.
    An adapter of layers that are not here adds nothing to those that are."""
    if lora.rank == 0:
        yield from model.modules[0].parameters()
        return
    frozen = FrozenModel(model)
    if targets := present(model.arch, lora.targets):
        adapter = Adapter(frozen, replace(lora, targets=targets))
        adapter.activate()
        yield from adapter.modules[0].parameters()


class _Remembering(LiveBytes):
    """Asks torch once for the shapes that an op, or a kernel, gives for the shapes that it takes: that is most of its
    time."""

    _known: ClassVar[dict[Any, Any]] = {}

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping) -> Any:
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        return self._remembered(func, args, kwargs)

    def one_kernel(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        self._within_kernel = True
        out = self._remembered(function, args, {})
        self._within_kernel = False
        for tensor in tensors_in(out):
            self.track(tensor)
        return out

    def _given(self, func: Any, out: Any) -> list[Tensor]:
        return [] if func.is_view else super()._given(func, out)

    def _remembered(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping) -> Any:
        key = func, *map(_description, args), *((name, _description(value)) for name, value in kwargs.items())
        if key in self._known:
            kind, shapes = self._known[key]
            made = [aten.empty_strided(*shape, dtype=dtype, device=nowhere.DEVICE) for *shape, dtype in shapes]
            return made[0] if kind is Tensor else kind(made)
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([*args, *kwargs.values()])}
        if all(t.device == nowhere.DEVICE and t.untyped_storage()._cdata not in given for t in made):
            kind = Tensor if isinstance(out, Tensor) else type(out)
            if kind in (Tensor, tuple, list) and (kind is Tensor or len(made) == len(out)):
                self._known[key] = kind, [(t.shape, t.stride(), t.dtype) for t in made]
        return out


@cache
def _makes_tensors(func: Any) -> bool:
    """Return whether an op gives new tensors only, and changes none."""
    return all(each.alias_info is None for each in (*func._schema.arguments, *func._schema.returns))


def _description(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_description, value)) if isinstance(value, tuple | list) else (type(value), value)


def _give_main_grad(parameter: Any, dtype: torch.dtype, *, forgets: bool) -> None:
    """Do as Megatron's DistributedDataParallel. forgets: the gradient that autograd brings is not kept."""
    parameter.main_grad = torch.empty(parameter.shape, dtype=dtype, device=nowhere.DEVICE)
    parameter.grad_added_to_main_grad = False
    if parameter.requires_grad and forgets:
        parameter.register_post_accumulate_grad_hook(_forget_gradient)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Marks:
    """Moments of a pass, by name: how many changes of live bytes came before."""

    def __init__(self, counter: LiveBytes):
        self._counter, self._at = counter, dict[Any, int]()

    def begin(self) -> None:
        self._at = {"begin": 1}
        self._counter.levels[:] = [self._counter.live_bytes]

    def __call__(self, name: Any) -> None:
        self._at.setdefault(name, len(self._counter.levels))

    def on_gradient(self, tensor: Tensor, name: Any) -> None:
        """Mark the moment at which the gradient of a tensor is there."""
        tensor.register_hook(lambda grad: self(("gradient", name)))

    def counted(self, start: Any, end: Any, backward: Any, done: Any) -> Counted:
        """A part whose forward and backward lie between these moments."""
        levels = np.array(self._counter.levels, dtype=np.int64)
        first, last, turn, stop = (self._at[name] for name in (start, end, backward, done))
        before = levels[first - 1]
        passed = np.concatenate([levels[first - 1 : last], levels[turn - 1 : stop]]) - before
        return Counted(int(levels[last - 1] - before), passed)


def _mark_start(marks: _Marks, module: Any, name: Any) -> None:
    """Mark where the forward of a module begins, and where its backward has ended."""

    def mark(module: Any, args: tuple, kwargs: Any) -> None:
        marks(name)
        marks.on_gradient(args[0] if args else kwargs["hidden_states"], name)

    module.register_forward_pre_hook(mark, with_kwargs=True)


def _mark_end(marks: _Marks, module: Any, name: Any) -> None:
    """Mark where the forward of a module ends, and where its backward begins."""

    def mark(module: Any, args: Any, output: Any) -> None:
        marks(name)
        marks.on_gradient(output[0] if isinstance(output, tuple) else output, name)

    module.register_forward_hook(mark)


def _routed(model: Model, setting: Setting, ids: Tensor) -> tuple[RoutedTokens | None, Bound | None]:
    """Make the routing data and the bound of a row of one document; None where the model, or the run, has none."""
    if setting.arch.experts is None:
        return None, None
    layout = setting.layout
    own = ids.chunk(layout.tp)[0] if layout.sequence_parallel else ids
    one = ids[:1]
    routed = RoutedTokens(own, own, one.double()[:, None], one, one, model.mesh.megatron.tp_cp)
    if setting.dispatch_bound is None:
        return routed, None
    lost = torch.zeros((), dtype=torch.float64, device=nowhere.DEVICE)
    return routed, Bound(setting.dispatch_bound, len(own), lost)


@cache
def layers_of(setting: Setting, tokens: Sequence[int]) -> list[Layers]:
    """Count as `count_layers`, in the process of `counting_process`."""
    return count_layers(setting, tokens) if nowhere.joined() else counting_process.ask(count_layers, setting, tokens)


@cache
def head_of(setting: Setting, tokens: int) -> Counted:
    """Count as `count_head`, in the process of `counting_process`."""
    return count_head(setting, tokens) if nowhere.joined() else counting_process.ask(count_head, setting, tokens)
