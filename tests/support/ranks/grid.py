"""One batch on one rank without micro-batches, and the same batch on other layouts, budgets and settings."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import Layout
from isoloss.tools.prove.bugs import NO_BUG, PlantedBug
from isoloss.tools.prove.parity import TOLERANCE, Case, Measurement, compare, freeze, measure, merge, reference_file
from isoloss.tools.prove.proof import on_layout
from isoloss.tools.prove.rank_pool import WorkerPool


class Grid:
    """References are made when a case first needs one, of the configuration as it was given, every sample whole, and
    kept as files that the ranks of other layouts read."""

    def __init__(self, pool: WorkerPool, config: Config | RLConfig, samples: Sequence[Sample], folder: Path):
        self.pool, self.config = pool, config
        self.arch = read_architecture(str(config.model.path))
        self.frozen = freeze(samples)
        self._folder = tempfile.mkdtemp(dir=folder)
        self._references: dict[Case, Measurement] = {}
        self._files: dict[Case, str] = {}

    def on(self, layout: Layout | str, precision: str = "fp64", parallel: Mapping[str, Any] | None = None, **changes):
        """The configuration there. parallel: its other fields; changes: its other groups."""
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        config = on_layout(replace(self.config, **changes), layout, precision)
        return replace(config, parallel=replace(config.parallel, **(parallel or {})))

    def on_ranks(self, layout: Layout | str, function, *arguments) -> list:
        """function(*arguments) on every rank of the layout."""
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        return self.pool.run(layout.world_size, function, *arguments)

    def reference(self, case: Case) -> Measurement:
        """Of one rank with everything in one micro-batch."""
        self.refer([case])
        return self._references[replace(case, max_tokens=0)]

    def refer(self, cases: Iterable[Case]) -> None:
        """Make the references that are missing, in one run."""
        wanted = dict.fromkeys(replace(case, max_tokens=0) for case in cases)
        new = [case for case in wanted if case not in self._references]
        if new:
            first = len(self._files)
            self._files |= {case: reference_file(self._folder, first + k) for k, case in enumerate(new)}
            whole = replace(self.config.batch, share_prefixes=False)
            found = self.run("1", new, write=True, batch=whole)
            self._references |= dict(zip(new, found, strict=True))

    def files_of(self, cases: Iterable[Case]) -> list[str]:
        """Where the references of these cases are."""
        return [self._files[replace(case, max_tokens=0)] for case in cases]

    def run(
        self, layout: Layout | str, cases: Sequence[Case], bug: PlantedBug = NO_BUG, write: bool = False, **changes: Any
    ) -> list[Measurement]:
        """changes: those of `on`."""
        if not write:
            self.refer(cases)
        arguments = self.on(layout, **changes), self.frozen, cases, self.files_of(cases), bug, write
        return merge(self.on_ranks(layout, measure, *arguments))

    def check(self, layout: Layout | str, cases: Sequence[Case], **changes: Any) -> list[Measurement]:
        """Loss and every gradient are the reference's; every parameter is compared; the canary is content."""
        found = self.run(layout, cases, **changes)
        for case, one in zip(cases, found, strict=True):
            against = compare(one, self.reference(case), TOLERANCE["fp64"])
            assert against.passed, f"{layout} {case}: {against.reason}"
            assert one.canary is None
            assert one.parameters.keys() == self.reference(case).parameters.keys()
        return found
