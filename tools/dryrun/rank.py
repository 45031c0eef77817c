"""A dry run of one rank, in a process of its own: build the Engine, take a step, and tell what its device did.

    python -m isoloss.tools.dryrun.rank RECIPE WORLD_SIZE RANK FILE [key=value ...]

FILE: of the report, JSON.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from isoloss.engine.batch import Sample
from isoloss.engine.config import Config
from isoloss.engine.engine import Engine
from isoloss.engine.losses import cross_entropy
from isoloss.engine.model_source import resolve
from isoloss.models.architecture import Architecture
from isoloss.models.mcore import patches
from isoloss.models.weights.weight_map import Weight
from isoloss.parallel import Layout
from isoloss.recipes.launch import compose_config
from isoloss.tools.dryrun.recorder import Recorder
from isoloss.tools.dryrun.report import PhaseReport, RankReport
from isoloss.tools.dryrun.world import META, Kernels, join, wait

STEPS = 2  # the second has what the first leaves behind


class NoWeights:
    """Weights of the right shapes, without values."""

    def whole(self, weight: Weight) -> Tensor:
        return torch.empty(weight.shape, device=META)


def dry_run(
    config: Config, rank: int, world_size: int, *, gpus_per_node: int = 8, kernels: Kernels = "cuda"
) -> RankReport:
    """A step of full rows (batch.max_tokens), each one document, whose tokens all are targets."""
    recorder = join(rank, world_size, gpus_per_node, kernels)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, from_scratch=True))
    source = dataclasses.replace(resolve(config), weights=NoWeights())
    answer_exchanges(source.arch, source.layout, config.batch.max_tokens, recorder)
    with recorder:
        with recorder.phase("build"):
            engine = Engine(config, source)
        recorder.name_groups(engine.mesh)
        resident = resident_bytes(engine, recorder.live_bytes)
        samples = full_rows(config.batch.max_tokens, source.layout)
        for _ in range(STEPS):
            with recorder.phase("forward and backward"):
                metrics = engine._forward_backward(samples, cross_entropy(config.loss))
            with recorder.phase("optimizer"):
                engine.optim_step()
    build, *_, forward_backward, optimizer = recorder.phases
    return RankReport(
        rank,
        engine.mesh.pp.rank(),
        sum(parameter.numel() for chunk in engine.chunks for parameter in chunk.parameters()),
        metrics.micro_batches,
        config.batch.max_tokens,
        [PhaseReport.of(phase, resident) for phase in (build, forward_backward, optimizer)],
    )


def resident_bytes(engine: Engine, built: int) -> dict[str, int]:
    """What stays on the device from step to step. built: bytes that are live after building."""
    parameters = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    weights = storage_bytes(parameters)
    gradients = storage_bytes([parameter.main_grad for parameter in parameters])  # pyright: ignore[reportAttributeAccessIssue]
    return {"weights": weights, "gradients": gradients, "optimizer": built - weights - gradients}


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Of the memory behind them, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def answer_exchanges(arch: Architecture, layout: Layout, tokens: int, recorder: Recorder) -> None:
    """Tell the ranks of a pipeline, and those that share experts, what they would ask each other."""
    rows = tokens // (layout.context * (layout.tp if layout.sequence_parallel else 1))
    patches.answer_shapes((rows, 1, arch.hidden_size))
    if arch.experts is not None:
        patches.answer_split_sizes(arch.experts.top_k, wait)
        recorder.share_selected = arch.experts.top_k / arch.experts.count


def full_rows(tokens: int, layout: Layout) -> Sequence[Sample]:
    """Twice as many rows for every data-parallel rank as its pipeline has stages."""
    mask_T = torch.ones(tokens, dtype=torch.bool)
    mask_T[0] = False
    return [Sample(torch.zeros(tokens, dtype=torch.int64), mask_T)] * (layout.dp * 2 * layout.pp)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=("sft",))
    parser.add_argument("world_size", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kernels", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args(argv)
    config = compose_config(arguments.recipe, Config, arguments.overrides)[0]
    report = dry_run(config, arguments.rank, arguments.world_size, kernels=arguments.kernels)
    arguments.file.write_text(report.dumps())
    return 0


if __name__ == "__main__":
    sys.exit(main())
