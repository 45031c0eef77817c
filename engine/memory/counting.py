"""Count what one layer of each kind, the embedding and the loss head keep and add in a training step: the real modules,
on tensors that have shapes and no values, as one rank of a world that is not there.

That needs a process of its own, which sees no GPU: `profile` starts one, and keeps it for the next question, unless
this process already is such a rank.
"""

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor

from isoloss.engine.memory import nowhere
from isoloss.engine.memory.live_bytes import LiveBytes
from isoloss.models.architecture import Architecture
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


@dataclass(frozen=True)
class Setting:
    """What decides the bytes of a part of a model, besides its tokens.

    arch: a model that has one layer of each kind.
    layout: tensor, context and expert parallelism; all else is 1.
    dtype, grad_dtype: of weights and of the buffer of gradients.
    accumulates: matrix products add to that buffer themselves.
    dispatch_bound: moe.dispatch_bound.
    """

    arch: Architecture
    layout: Layout
    memory: ActivationMemory
    kernels: Kernels
    dtype: torch.dtype
    grad_dtype: torch.dtype
    accumulates: bool
    dispatch_bound: float | None


@dataclass(frozen=True)
class Counted:
    """Bytes of a part of a model on a rank.

    kept: until the backward of the part.
    levels: what is live on the way through the forward of the part, and through its backward, where nothing behind the
        part is kept any more; over what was live before the part.
    """

    kept: int
    levels: np.ndarray


class Halves(NamedTuple):
    """A layer: attention, with its norm; and the MLP, with the norm behind the layer that is merged with it."""

    attention: Counted
    mlp: Counted


class Counts(NamedTuple):
    """embedding: with what is made for a row before the layers. head: final norm and loss head."""

    embedding: Counted
    layers: Sequence[Halves]
    head: Counted


def count(setting: Setting, tokens: int, part: Literal["layers", "head"]) -> Counts:
    """tokens: of a rank. In a process that is a rank of no world, or becomes one here."""
    counter, arch, layout = LiveBytes("meta"), setting.arch, setting.layout
    nowhere.join(counter, 0, layout.world_size)
    nowhere.share_evenly(arch)
    mesh = Mesh.create(layout)
    with nowhere.without_values(counter):
        options = BuildOptions(setting.memory, setting.kernels)
        model = Model.build(arch, mesh, setting.dtype, (arch.num_layers,), options)
        if setting.accumulates:
            accumulate_in_products(model.modules)
        for parameter in model.modules[0].parameters():
            _give_main_grad(parameter, setting.grad_dtype, forgets=part == "layers" or not arch.tie_embeddings)
        _make_gather_buffer(layout, tokens, arch.hidden_size, setting.dtype)
        marks = _Marks(counter)
        if part == "head":
            return Counts(_NOTHING, [], _count_head(model, tokens, marks))
        return _count_layers(model, setting, tokens, marks)


_NOTHING = Counted(0, np.zeros(1, dtype=np.int64))


def _give_main_grad(parameter: Any, dtype: torch.dtype, *, forgets: bool) -> None:
    """Do as Megatron's DistributedDataParallel. forgets: the gradient that autograd brings is not kept."""
    parameter.main_grad = torch.empty(parameter.shape, dtype=dtype, device=nowhere.DEVICE)
    parameter.grad_added_to_main_grad = False
    if parameter.requires_grad and forgets:
        parameter.register_post_accumulate_grad_hook(_forget_gradient)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _make_gather_buffer(layout: Layout, tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
    """Make the buffer that all gathers of rows share, which is there from the first step on."""
    if layout.sequence_parallel:
        get_global_memory_buffer().get_tensor([tokens, 1, hidden_size], dtype, "mpu")


class _Marks:
    """Moments of a pass, by name: how many changes of live bytes came before."""

    def __init__(self, counter: LiveBytes):
        self._counter, self._at = counter, dict[Any, int]()
        counter.levels[:] = [counter.live_bytes]

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


def _count_layers(model: Model, setting: Setting, tokens: int, marks: _Marks) -> Counts:
    chunk = model.modules[0]
    starts = []
    for index, layer in enumerate(chunk.decoder.layers):
        starts += [("attention", index), ("mlp", index)]
        _mark_start(marks, layer, ("attention", index))
        _mark_start(marks, layer.mlp, ("mlp", index))
        _mark_end(marks, layer, ("end", index))
    marks("start")
    ids = torch.zeros(tokens, dtype=torch.int64, device=nowhere.DEVICE)
    routed, bound = _routed(model, setting, ids)
    row = RoutedRow(lengths=(tokens * setting.layout.context,), tokens=routed, bound=bound)
    total = forward_row(chunk, ids, ids, row).sum()
    total.backward()
    marks("done")
    ends = [("end", index) if half == "mlp" else ("mlp", index) for half, index in starts]
    halves = [marks.counted(start, end, ("gradient", end), ("gradient", start)) for start, end in zip(starts, ends)]
    embedding = marks.counted("start", starts[0], ("gradient", starts[0]), "done")
    return Counts(embedding, [*map(Halves, halves[::2], halves[1::2])], _NOTHING)


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
    """What the experts get of a row of one document, besides its tokens."""
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


def _count_head(model: Model, tokens: int, marks: _Marks) -> Counted:
    """Count the end of the last stage, where every token is a target. Kept is what of its gradients autograd adds to
    those of a tied embedding, which come last."""
    shards = model.mesh.tp.size() if model.mesh.layout.sequence_parallel else 1
    shape = (tokens // shards, 1, model.arch.hidden_size)
    hidden = torch.empty(shape, dtype=model.dtype, device=nowhere.DEVICE, requires_grad=True)
    ids = torch.zeros(tokens, dtype=torch.int64, device=nowhere.DEVICE)
    marks("start")
    normed = model.modules[0].decoder.final_layernorm(hidden)
    if model.arch.critic:
        loss = model.values(normed, ids).sum()
    else:
        loss = model.logprobs(normed, ids, ids)[0].sum()
    del normed
    marks("turn")
    loss.backward()
    assert hidden.grad is not None
    hidden.grad = None
    marks("end")
    whole = marks.counted("start", "turn", "turn", "end")
    return replace(whole, kept=int(whole.levels[-1]))


# ---- the process that counts -----------------------------------------------------------------------------------------


@cache
def counted(setting: Setting, tokens: int, part: Literal["layers", "head"]) -> Counts:
    """As `count`, in a process that may do that."""
    if nowhere.joined():
        return count(setting, tokens, part)
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump((setting, tokens, part), process.stdin)
        process.stdin.flush()
        answer = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError) as error:
        raise RuntimeError("the process that counts memory has ended: memory.check=false starts without it") from error
    if isinstance(answer, str):
        raise RuntimeError(f"memory could not be counted: {answer}; memory.check=false starts without it")
    return answer


@cache
def _process() -> subprocess.Popen:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "isoloss.engine.memory.counting"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.kill)
    return process


def main() -> None:
    """Answer questions until the one who asks has gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Megatron prints
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = count(*question)
        except Exception as error:  # for the one who asks
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
