"""Make a dry run of one rank, in a process of its own: build the Engine, go through the phases of a run, and report
what its device did.

    python -m isoloss.tools.plan.rank RECIPE WORLD_SIZE RANK FILE [key=value ...]

FILE: the report, JSON.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from isoloss.engine.config.schema import Config
from isoloss.engine.memory import nowhere
from isoloss.engine.memory.nowhere import SimulatedRank, without_values
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import resolve
from isoloss.engine.step.optimizer import gradient_buffers
from isoloss.models.kinds.weight import Weight
from isoloss.recipes.launch import RECIPES, compose_config
from isoloss.tools.plan.phases import GENERATION, full_rows, take
from isoloss.tools.plan.recorder import Phase
from isoloss.tools.plan.report import PhaseReport, RankReport
from isoloss.tools.plan.world import answer_exchanges, join, save_load_export

# Kinds of memory that are offloaded before a phase where servers share the device.
AWAY = {"weight sync": ("gradients", "optimizer"), GENERATION: ("weights", "gradients", "optimizer")}


class NoWeights:
    """Weights of the right shapes, without values."""

    def whole(self, weight: Weight) -> Tensor:
        return torch.empty(weight.shape, device=nowhere.DEVICE)


def dry_run(
    config: Config,
    simulated: SimulatedRank,
    *,
    halves: bool = False,
    files: Path | None = None,
    documents: int = 1,
) -> RankReport:
    """Return a report of the last phase of each name: rows are full (batch.max_tokens), and all tokens are targets.

    documents: their number in a row. halves: see `take`.
    files: folder for a checkpoint and an export of rank 0 (`save_load_export`); None: neither is written.
    The optimizer takes its step on the device, as a copy to the host needs values; the bytes that
    memory.offload_optimizer keeps on the host are subtracted afterwards.
    """
    recorder = join(simulated)
    share = config.memory.offload_optimizer
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, from_scratch=True),
        # A run that does not fit is planned, too. Rows share no prefixes, as their tokens have no values.
        memory=dataclasses.replace(config.memory, check=False, offload_optimizer=0.0),
        batch=dataclasses.replace(config.batch, share_prefixes=False),
    )
    source = dataclasses.replace(resolve(config), weights=NoWeights(), factors=NoWeights())
    answer_exchanges(source.arch, source.layout)
    rows = full_rows(config.batch.max_tokens, source.layout, documents)
    with without_values(recorder):
        with recorder.phase("build"):
            engine = Engine(config, source)
        recorder.name_groups(engine.mesh)
        resident = resident_bytes(engine, recorder.live_bytes)
        micro_batches = take(engine, config, rows, recorder, halves)
        if files is not None:
            save_load_export(engine, files, recorder)
    on_host = round(share * resident["optimizer"])
    last = {phase.name: phase for phase in recorder.phases}
    return RankReport(
        simulated.rank,
        engine.mesh.pp.rank(),
        sum(parameter.numel() for parameter in parameters_of(engine)),
        micro_batches,
        config.batch.max_tokens,
        [reported(phase, resident, on_host, leaves=config.shares_device) for phase in last.values()],
        [(*fault, count) for fault, count in recorder.faults.most_common()],
    )


def reported(phase: Phase, resident: Mapping[str, int], on_host: int, *, leaves: bool) -> PhaseReport:
    """Report a phase. on_host: optimizer bytes that stay on the host. leaves: whether servers share the device."""
    left = AWAY.get(phase.name, ()) if leaves else ()
    if "optimizer" in left:
        return PhaseReport.of(phase, {kind: nbytes for kind, nbytes in resident.items() if kind not in left})
    return PhaseReport.of(phase, {**resident, "optimizer": resident["optimizer"] - on_host}).less(on_host)


def resident_bytes(engine: Engine, built: int) -> dict[str, int]:
    """Return the bytes that stay on the device from step to step, by kind. built: bytes live after building."""
    weights = storage_bytes(parameters_of(engine))
    gradients = storage_bytes(gradient_buffers(engine.trained.chunks))
    return {"weights": weights, "gradients": gradients, "optimizer": built - weights - gradients}


def parameters_of(engine: Engine) -> list[Tensor]:
    """Return the parameters of the model and of its adapter."""
    modules = {id(module): module for module in (*engine.model.modules, *engine.trained.modules)}
    return [parameter for module in modules.values() for parameter in module.parameters()]


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("world_size", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kernels", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--documents", type=int, default=1, help="of a row; default: %(default)s")
    parser.add_argument("--halves", action="store_true", help="also a step of half the rows")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args(argv)
    config = compose_config(arguments.recipe, RECIPES[arguments.recipe].config, arguments.overrides)[0]
    simulated = SimulatedRank(arguments.rank, arguments.world_size, kernels=arguments.kernels)
    report = dry_run(config, simulated, halves=arguments.halves, documents=arguments.documents)
    arguments.file.write_text(report.dumps())
    return 0


if __name__ == "__main__":
    sys.exit(main())
