"""The memory that a real step of this rank takes, as torch's allocator tells it to the profiler."""

import gc

from torch.profiler import ProfilerActivity, profile

from isoloss.engine.config import Config
from isoloss.engine.engine import Engine
from isoloss.engine.losses import cross_entropy
from isoloss.tools.dryrun.rank import full_rows


def peak(config: Config) -> int:
    """Most bytes that are allocated at a time, in building the engine and in two steps of it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine = Engine(config)
        samples = full_rows(config.batch.max_tokens, engine.mesh.layout)
        for _ in range(2):
            engine.train_step(samples, cross_entropy(config.loss))
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    level = most = 0
    for _, nbytes in changes:
        level += nbytes
        most = max(most, level)
    return most
