"""The same state saved by Megatron's default strategy and by ours; runs on every rank."""

from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from isoloss.engine import checkpoint
from isoloss.engine.checkpoint_writer import SaveInProcess
from support.transformers_parity import TOKEN_MEAN, make_engine, make_samples


def both_ways(model: Path, theirs: Path, ours: Path, vocab_size: int) -> None:
    """theirs, ours: empty folders."""
    engine = make_engine(model, "fp32", tp=2)
    engine.train_step(make_samples((2, 40, 17), vocab_size), TOKEN_MEAN)
    for folder, strategy in ((ours, SaveInProcess()), (theirs, None)):
        state = checkpoint._state(engine.chunks, engine.optimizer, engine.mesh, {"step": 1}, is_loading=False)
        filesystem_async._results_queue = None
        dist_checkpointing.save(state, str(folder), strategy)
    filesystem_async._results_queue._manager.shutdown()
