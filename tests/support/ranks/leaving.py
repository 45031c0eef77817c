"""Engines that leave their device between two steps; runs on every rank."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.memory import offload
from isoloss.engine.rl.backends.local.transformers_backend import TransformersBackend
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reference import Reference
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.tools.prove.parity import thaw
from support.runs import rl_runs
from support.runs.training import Arrays, weights


@dataclass(frozen=True)
class Cycles:
    """numbers: losses, gradient norms and log-probabilities of every cycle. sent: of every cycle, a checksum of each
    weight on its way to servers. there, without_training, away: bytes of all tensors that this run made."""

    numbers: list[float]
    sent: list[dict[str, float]]
    weights: Arrays
    there: int
    without_training: int
    away: int


def live_bytes() -> int:
    """Of the storages of all tensors of this process, but for the memory of the host that stands in for another."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(nbytes for nbytes in found.values() if nbytes != offload.CHUNK)


def settled() -> int:
    """The same once three readings agree: gloo's threads let go of a tensor some time after its exchange."""
    readings = [live_bytes()]
    deadline = time.monotonic() + 5
    while readings[-3:] != readings[-1:] * 3 and time.monotonic() < deadline:
        time.sleep(0.05)
        readings.append(live_bytes())
    return readings[-1]


def cycles(config: Config, frozen: bytes, count: int, leaves: bool, chunk: int = 1 << 16) -> Cycles:
    """Step, weights to the servers, log-probabilities; where it leaves, as a run beside servers does."""
    before = settled()
    with mock.patch.object(offload, "CHUNK", chunk):
        engine, samples = Engine(config), thaw(frozen)
        numbers: list[float] = []
        sent: list[dict[str, float]] = []
        there = without_training = away = 0
        for cycle in range(count):
            nbytes = settled if cycle == count - 1 else live_bytes
            metrics, result = engine.train_step(samples, cross_entropy(LossConfig()))
            numbers += [metrics.loss, result.grad_norm]
            there = nbytes() - before
            if leaves:
                engine.offload(weights=False)
                without_training = nbytes() - before
            buckets = engine.weight_stream(20_000, "every rank")
            sent.append({name: tensor.double().sum().item() for bucket in buckets for name, tensor in bucket})
            if leaves:
                del buckets
                engine.offload()
                away = nbytes() - before
            numbers += [value for of_one in engine.logprobs(samples) for value in of_one.tolist()]
        return Cycles(numbers, sent, weights(engine), there, without_training, away)


def every_verb(config: Config, frozen: bytes, folder: str) -> None:
    """Each is the first that is asked for after leaving."""
    engine, samples, loss = Engine(config), thaw(frozen), cross_entropy(LossConfig("sum"))
    verbs: dict[str, Callable[[], object]] = {
        "forward_backward": lambda: engine.forward_backward(samples, loss),
        "optim_step": engine.optim_step,
        "train_step": lambda: engine.train_step(samples, loss),
        "evaluate": lambda: engine.evaluate(samples, loss),
        "logprobs": lambda: engine.logprobs(samples),
        "logits": lambda: engine.logits(samples),
        "zero_grad": engine.zero_grad,
        "reduce_gradients": engine.reduce_gradients,
        "weights": lambda: [name for name, _ in engine.weights()],
        "weight_stream": lambda: [len(bucket) for bucket in engine.weight_stream(20_000, "every rank")],
        "save": lambda: engine.save(f"{folder}/saved"),
        "load": lambda: engine.load(f"{folder}/saved"),
        "export_hf": lambda: engine.export_hf(f"{folder}/exported"),
    }
    for verb in verbs.values():
        engine.zero_grad()
        engine.offload()
        verb()


def interrupted(config: Config, frozen: bytes, fails_at: int, comes_back: bool) -> tuple[bool, list[float], Arrays]:
    """Three steps; after the first it fails to leave, or to come back, amid its copies and changes of size, is asked
    again, and then steps. A copy that fails leaves garbage, as half a copy does: fresh memory may hold the right bytes
    by luck. Whether it failed; losses; weights."""
    engine, samples = Engine(config), thaw(frozen)
    calls, failed = [], False
    copy = torch.Tensor.copy_

    def or_fail(method: Callable) -> Callable:
        def call(*args: object, **kwargs: object):
            calls.append(method)
            if len(calls) == fails_at:
                if method is copy:
                    args[0].fill_(255)
                raise MemoryError
            return method(*args, **kwargs)

        return call

    losses = [engine.train_step(samples, cross_entropy(LossConfig()))[0].loss]
    if comes_back:
        engine.offload()
    with (
        mock.patch.object(torch.UntypedStorage, "resize_", or_fail(torch.UntypedStorage.resize_)),
        mock.patch.object(torch.Tensor, "copy_", or_fail(copy)),
    ):
        try:
            engine.return_to_device() if comes_back else engine.offload()
        except MemoryError:
            failed = True
    engine.offload()
    losses += [engine.train_step(samples, cross_entropy(LossConfig()))[0].loss for _ in range(2)]
    return failed, losses, weights(engine)


def amid_a_step(config: Config, frozen: bytes) -> tuple[str, bool]:
    """What is told, and whether the step is the one without the question."""
    norms, told = [], ""
    for asks in (True, False):
        engine = Engine(config)
        engine.forward_backward(thaw(frozen), cross_entropy(LossConfig("sum")))
        if asks:
            try:
                engine.offload()
            except ValueError as error:
                told = str(error)
        norms.append(engine.optim_step().grad_norm)
    return told, norms[0] == norms[1]


@dataclass(frozen=True)
class Loop:
    """weights: of policy and critic. generating, sending: bytes of (weights, gradients) that the trainer had on the
    device whenever the backend generated, and when it took the first bucket."""

    weights: Arrays
    generating: list[tuple[int, int]]
    sending: list[tuple[int, int]]


def loop(config: RLConfig, killed_after: int | None = None) -> Loop:
    """The loop of reinforcement learning, with the backend in this process."""
    engines: list[Engine] = []
    references: list[Reference] = []
    generating: list[tuple[int, int]] = []
    sending: list[tuple[int, int]] = []
    serve, update = TransformersBackend.serve, TransformersBackend.update_weights

    def there() -> tuple[int, int]:
        parameters = [parameter for engine in engines for parameter in engine.chunks[0].parameters()]
        weights = [*parameters, *(tensor for reference in references for tensor in reference._kept)]
        gradients = [parameter.main_grad for parameter in parameters]  # pyright: ignore[reportAttributeAccessIssue]
        return sum(t.untyped_storage().nbytes() for t in weights), sum(t.untyped_storage().nbytes() for t in gradients)

    def generating_there(*args):
        generating.append(there())
        serve(*args)

    def sending_there(backend, buckets, version):
        def noting():
            for index, bucket in enumerate(buckets):
                if index == 0:
                    sending.append(there())
                yield bucket

        update(backend, noting(), version)

    def noted(kind, found):
        build = kind.__init__

        def init(self, *args, **kwargs):
            build(self, *args, **kwargs)
            found.append(self)

        return mock.patch.object(kind, "__init__", init)

    with (
        mock.patch.object(TransformersBackend, "serve", generating_there),
        mock.patch.object(TransformersBackend, "update_weights", sending_there),
        noted(Engine, engines),
        noted(Reference, references),
    ):
        return Loop(rl_runs.train(config, killed_after), generating, sending)
