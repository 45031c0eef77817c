"""Dry runs of many configurations in one process: python -m support.dry_runs FILE, which holds rows of JSON."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from torch import Tensor

from isoloss.recipes.launch import compose_config
from isoloss.tools.dryrun.report import RankReport


@dataclass(frozen=True)
class Row:
    """device: of the tensors without values. plant: a fault, by its name in PLANTS. micro_batches: of a step on a rank;
    None: as many as a plan takes, which is twice the pipeline's stages."""

    recipe: str
    overrides: Sequence[str]
    world: int
    rank: int
    device: str = "meta"
    plant: str | None = None
    micro_batches: int | None = None


def in_a_process(rows: Sequence[Row], file: Path) -> list[RankReport]:
    file.write_text(json.dumps([asdict(row) for row in rows]))
    command = [sys.executable, "-m", "support.dry_runs", str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.PIPE, text=True)
    return [RankReport.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _fewer(count: int):
    from isoloss.tools.dryrun import rank

    rows = rank.full_rows
    return mock.patch.object(rank, "full_rows", lambda tokens, layout: rows(tokens, layout)[: count * layout.dp])


def _host_tensor_into_a_collective():
    from isoloss.engine import step

    totals = step.totals_of
    on_host = lambda consumed, *rest: totals([each.cpu() for each in consumed], *rest)
    return mock.patch.object(step, "totals_of", on_host), mock.patch.object(
        step.torch.cuda, "current_device", lambda: "cpu"
    )


def _item_for_every_micro_batch():
    from isoloss.engine import step

    inputs = step._token_inputs

    def asking(model, micro_batch, hidden: Tensor, loss):
        hidden.sum().item()
        return inputs(model, micro_batch, hidden, loss)

    return (mock.patch.object(step, "_token_inputs", asking),)


def _strided_send():
    from isoloss.parallel import ring

    join = ring._join
    return (
        mock.patch.object(
            ring, "_join", lambda key, value: join(key, value).transpose(0, 1).contiguous().mT.mT.transpose(0, 1)
        ),
    )


def _host_tensor_beside_a_device_tensor():
    from isoloss.engine import step

    inputs = step._token_inputs

    def mixing(model, micro_batch, hidden: Tensor, loss):
        import torch

        return inputs(model, micro_batch, hidden * torch.ones(hidden.shape), loss)

    return (mock.patch.object(step, "_token_inputs", mixing),)


PLANTS = {
    "host tensor into a collective": _host_tensor_into_a_collective,
    "item for every micro-batch": _item_for_every_micro_batch,
    "strided send": _strided_send,
    "host tensor beside a device tensor": _host_tensor_beside_a_device_tensor,
}


def main() -> None:
    import contextlib

    from isoloss.tools.dryrun.rank import RECIPES, dry_run  # it changes torch: in this process only

    for values in json.loads(Path(sys.argv[1]).read_text()):
        row = Row(**values)
        config = compose_config(row.recipe, RECIPES[row.recipe], row.overrides)[0]
        with contextlib.ExitStack() as planted:
            for patch in PLANTS[row.plant]() if row.plant else ():
                planted.enter_context(patch)
            if row.micro_batches is not None:
                planted.enter_context(_fewer(row.micro_batches))
            print(dry_run(config, row.rank, row.world, device=row.device).dumps(), flush=True)


if __name__ == "__main__":
    main()
