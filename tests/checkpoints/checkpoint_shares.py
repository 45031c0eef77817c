"""What each rank writes, reads and holds of a checkpoint, and the same state through Megatron's own code, which gathers
the optimizer. Runs on every rank."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from support.models.transformers_parity import TOKEN_MEAN, make_engine
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.step.engine import Engine

OURS = ("state_dict", "sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable")
State = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Cost:
    """Of a save and a load on a rank, in bytes. host: the most that was allocated at a time, while saving and loading.
    read: from files, in the same two. weights: of this rank's shard of the model."""

    host: tuple[int, int]
    read: tuple[int, int]
    weights: int


def save_and_load(model: Path, folder: Path, samples: Sequence[Sample], parallel: dict) -> Cost:
    engine = make_engine(model, "bf16", **parallel)
    engine.train_step(samples, TOKEN_MEAN)
    saved = _measured(lambda: engine.save(folder))
    loaded = _measured(lambda: engine.load(folder))
    weights = sum(p.numel() * p.element_size() for chunk in engine.chunks for p in chunk.parameters())
    return Cost((saved[0], loaded[0]), (saved[1], loaded[1]), weights)


def _measured(run: Callable[[], object]) -> tuple[int, int]:
    """(most bytes allocated by torch at a time, bytes read by this process)."""
    dist.barrier()
    before = _bytes_read()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    read = _bytes_read() - before
    events = profiler.profiler.kineto_results.events()
    memory = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in memory), initial=0)), read


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def train_or_load(model: Path, before: Path, folder: Path, parallel: dict, samples: Sequence[Sample] | None) -> None:
    """A step on samples, or the checkpoint `before`; saved into folder."""
    engine = make_engine(model, "bf16", **parallel)
    if samples is None:
        engine.load(before)
    else:
        engine.train_step(samples, TOKEN_MEAN)
    engine.save(folder)


def exchange(model: Path, ours: Path, theirs: Path, samples: Sequence[Sample], parallel: dict) -> tuple[bool, bool]:
    """The same state saved by us, and by Megatron's own code, which gathers it. Returns whether we read from its files
    what this rank had, and whether its loader finds in ours what this rank had."""
    engine = make_engine(model, "bf16", **parallel)
    for _ in range(2):
        engine.train_step(samples, TOKEN_MEAN)
    wanted = _state(engine)
    engine.save(ours)
    with _megatrons_own(engine):
        engine.save(theirs)
    for tensors in _state(engine, copied=False):
        for tensor in tensors.values():
            tensor.zero_()
    engine.load(theirs)
    read = _same(_state(engine), wanted)
    with _megatrons_own(engine) as found:
        state = checkpoint._state(engine.model, engine.optimizer, is_loading=True)
        engine.optimizer.load_state_dict(dist_checkpointing.load(state, str(ours))["optimizer"])
    return read, _same(found, wanted)


@contextlib.contextmanager
def _megatrons_own(engine: Engine) -> Iterator[State]:
    """Without our way of saving and loading the optimizer; yields what Megatron's would then set, by parameter. It
    could not: among the tensors it looks for a step count."""
    parts, found = _parts(engine), []
    ours = [dict(vars(part)) for part in parts]
    for part in parts:
        for name in OURS:
            delattr(part, name)
        part._set_main_param_and_optimizer_states = lambda parameter, tensors: found.append(
            {name: tensor.clone() for name, tensor in tensors.items()}
        )
    yield found
    for part, attributes in zip(parts, ours):
        vars(part).clear()
        vars(part).update(attributes)


def _parts(engine: Engine) -> list[DistributedOptimizer]:
    parts = engine.optimizer.chained_optimizers
    assert all(isinstance(part, DistributedOptimizer) for part in parts)
    return parts


def _state(engine: Engine, copied: bool = True) -> State:
    """In the order in which Megatron loads it."""
    found = []
    for part in _parts(engine):
        for maps, buffer in zip(part.gbuf_ranges, part.buffers):
            own = {p for buckets in maps.values() for bucket in buckets for p in bucket["param_map"]}
            for parameter in buffer.param_index_map:
                if parameter in own:
                    state = part._get_main_param_and_optimizer_states(parameter)
                    state = {name: state[name] for name in ("param", "exp_avg", "exp_avg_sq")}
                    found.append({name: t.detach().clone() if copied else t.detach() for name, t in state.items()})
    return found


def _same(found: State, wanted: State) -> bool:
    return len(found) == len(wanted) > 0 and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(found, wanted)
    )
