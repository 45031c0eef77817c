"""Steps whose weights are gathered in the next pass, and everyone who reads weights after them; runs on every rank."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, shard_buffer
from safetensors.torch import load_file
from support.ranks import grouped
from support.runs.training import Arrays, Killed, weights

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.rl.reference import Reference
from isoloss.engine.step import optimizer
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, TokenInputs, cross_entropy
from isoloss.tools.prove.parity import thaw

BUCKET = 3000  # parameters; a tiny model has several buckets then


class Late:
    """A handle of an all-gather that comes when it is waited for. Before, what other ranks stepped is not a number."""

    def __init__(self, bucket_group: Any):
        self._arrived = []
        for bucket in bucket_group.buckets:
            shards = shard_buffer(bucket.param_data, bucket_group.intra_distributed_optimizer_instance_size)
            mine = bucket_group.intra_distributed_optimizer_instance_rank
            whole = torch.empty_like(bucket.param_data)
            group = bucket_group.intra_distributed_optimizer_instance_group
            dist.all_gather_into_tensor(whole, shards[mine].clone(), group=group)
            self._arrived.append((bucket.param_data, whole))
            for rank, shard in enumerate(shards):
                if rank != mine:
                    shard.fill_(float("nan"))

    def wait(self) -> None:
        for weights_, whole in self._arrived:
            weights_.copy_(whole)


@contextlib.contextmanager
def small_buckets(*, late: bool) -> Iterator[list[int]]:
    """late: instead of gloo's own handles, which may come before they are waited for. Gives a list to which every
    gather of a bucket adds."""
    begun, start = [], _ParamAndGradBucketGroup.start_param_sync

    def start_late(self, force_sync: bool = False) -> None:
        begun.append(len(self.params))
        if late and self.ddp_config.overlap_param_gather:
            assert self.param_gather_handle is None and not force_sync
            self.param_gather_handle = Late(self)
        else:
            start(self, force_sync)

    of_ddp = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
    with (
        mock.patch.object(optimizer, "DistributedDataParallelConfig", of_ddp),
        mock.patch.object(_ParamAndGradBucketGroup, "start_param_sync", start_late),
    ):
        yield begun


@contextlib.contextmanager
def by_megatron() -> Iterator[None]:
    """Megatron's optimizers gather themselves, in their step."""
    with mock.patch.object(optimizer.Gather, "defer", lambda self: contextlib.nullcontext()):
        yield


def steps(
    config: Config, frozen: bytes, *, megatron: bool = False, late: bool = True, at_once: bool = False
) -> tuple[list[float], Arrays, int, int]:
    """Losses and gradient norms of three steps and the weights after them; buckets, and gathers of a bucket.

    megatron: see `by_megatron`. late: see `small_buckets`. at_once: experts as on a GPU.
    """
    samples, loss = thaw(frozen), cross_entropy(LossConfig())
    with contextlib.ExitStack() as stack:
        begun = stack.enter_context(small_buckets(late=late))
        counts = stack.enter_context(grouped.on_cpu()) if at_once else {}
        if megatron:
            stack.enter_context(by_megatron())
        engine = Engine(config)
        done = [engine.train_step(samples, loss) for _ in range(3)]
        after = weights(engine)
        assert all(result.applied for _, result in done) and bool(counts) == at_once
        buckets = sum(len(c.bucket_groups) + len(c.expert_parallel_bucket_groups) for c in engine.chunks)
        return [x for m, r in done for x in (m.loss, r.grad_norm)], after, buckets, len(begun)


Reader = Callable[[Engine, Sequence[Sample], Path], Sequence[Any]]  # numbers, or arrays


def _read_at_once(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    return [whole.clone() for _, whole in engine.model.weights()]


def stream(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    return [tensor.clone() for bucket in engine.weight_stream(1 << 14, "every rank") for _, tensor in bucket]


def export(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    engine.export_hf(folder / "hf")
    files = sorted((folder / "hf").glob("*.safetensors"))
    return [tensor for file in files for _, tensor in sorted(load_file(file).items())]


def save(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    """And load right after another step, which must not come through."""
    engine.save(folder / "saved")
    engine.train_step(samples, cross_entropy(LossConfig()))
    engine.load(folder / "saved")
    metrics, result = engine.train_step(samples, cross_entropy(LossConfig()))
    return [metrics.loss, result.grad_norm, *weights(engine).values()]


def leave(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    engine.offload()
    engine.return_to_device()
    return _read_at_once(engine, samples, folder)


def leave_amid(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    """After a pass in which a rank had nothing to do, and waited for nothing."""
    found = [engine.evaluate(samples[:1], cross_entropy(LossConfig())).loss]
    engine.offload()
    assert all(bucket.param_gather_handle is None for bucket in engine.gather._buckets)
    return [*found, *(w.clone() for _, w in engine.weights())]


def idle(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    """A rank has nothing to do, and all ranks step right after."""
    found = [engine.evaluate(samples[:1], cross_entropy(LossConfig())).loss]
    metrics, result = engine.train_step(samples[:1], cross_entropy(LossConfig()))
    return [*found, metrics.loss, result.grad_norm, *weights(engine).values()]


def spoiled(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    """A step that is not applied changes nothing, and leaves nothing to gather."""
    empty = [type(sample)(sample.tokens_T, torch.zeros_like(sample.mask_T)) for sample in samples]
    engine.train_step(samples, cross_entropy(LossConfig()))
    _, result = engine.train_step(empty, cross_entropy(LossConfig()))
    assert not result.applied
    return _read_at_once(engine, samples, folder)


def failed(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    """Steps that end in the middle: before the optimizer's, and right after it."""
    loss, step = cross_entropy(LossConfig()), engine.optimizer.step_with_ready_grads

    def stepped_and_died() -> None:
        step()
        raise Killed

    for target, name, dies in (
        (engine, "optim_step", mock.Mock(side_effect=Killed)),
        (engine.optimizer, "step_with_ready_grads", stepped_and_died),
    ):
        with mock.patch.object(target, name, dies), contextlib.suppress(Killed):
            engine.train_step(samples, loss)
    metrics, result = engine.train_step(samples, loss)
    return [metrics.loss, result.grad_norm, *weights(engine).values()]


def reference(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    """Of the weights of now, asked after another step; and the policy's, which changed places with them twice."""
    engine.return_to_device()
    kept = Reference(engine, offload=False)
    engine.train_step(samples, cross_entropy(LossConfig()))
    return [*kept.logprobs(samples, 1.0), *weights(engine).values()]


def to_one(inputs: TokenInputs) -> torch.Tensor:
    assert inputs.values_N is not None
    return (inputs.values_N - 1) ** 2


def critic(engine: Engine, samples: Sequence[Sample], folder: Path) -> Sequence[Any]:
    other = Engine(engine.config, engine.source, critic_of=engine)
    for _ in range(2):
        other.train_step(samples, Loss.of(to_one))
    return other.values(samples)


READERS: dict[str, Reader] = {
    "logprobs": lambda engine, samples, folder: engine.logprobs(samples),
    "logits": lambda engine, samples, folder: engine.logits(samples),
    "evaluate": lambda engine, samples, folder: [engine.evaluate(samples, cross_entropy(LossConfig())).loss],
    "weights": lambda engine, samples, folder: [*weights(engine).values()],
    "weight_stream": stream,
    "export_hf": export,
    "save and load": save,
    "offload": leave,
    "offload amid a gather": leave_amid,
    "a rank without samples": idle,
    "a step that is not applied": spoiled,
    "a step that fails": failed,
    "reference": reference,
    "values": critic,
}


def read(config: Config, frozen: bytes, reader: str, folder: str, megatron: bool) -> list[np.ndarray]:
    """What a reader finds right after two steps. megatron: see `by_megatron`."""
    samples = thaw(frozen)
    with small_buckets(late=True), by_megatron() if megatron else contextlib.nullcontext():
        engine = Engine(config)
        for _ in range(2):
            engine.train_step(samples, cross_entropy(LossConfig()))
        found = READERS[reader](engine, samples, Path(folder))
    arrays = (each.numpy(force=True) if isinstance(each, torch.Tensor) else np.asarray(each) for each in found)
    return [array.copy() for array in arrays]
