"""Begin the run of any recipe: check what a rank can check alone, the cheapest first, load the data, join the world and
build the engine, and after all checks create the folder and start the run."""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from isoloss.engine.config.schema import Config, DataConfig
from isoloss.engine.data.bad_rows import Reject, RejectsOfRun
from isoloss.engine.data.in_memory import GivenRows, keep_rows
from isoloss.engine.run.callbacks import NO_CALLBACKS, Callbacks
from isoloss.engine.run.folder import (
    Fingerprint,
    cache_folder,
    check_fingerprints,
    check_folder,
    open_folder,
    with_date,
)
from isoloss.engine.run.health import Watched
from isoloss.engine.run.rank_agreement import check_ranks_agree, function_fingerprints
from isoloss.engine.run.run import Run
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import resolve
from isoloss.models.architecture import Architecture
from isoloss.parallel import UserError
from isoloss.parallel.runtime import device


class Rows(Protocol):
    """The rows of a split: a digest of all that is learned from them, and the bad rows that were left out."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def rejects(self) -> Sequence[Reject]: ...


RowsT = TypeVar("RowsT", bound=Rows)


@dataclass(frozen=True)
class Data(ABC, Generic[RowsT]):
    """The data of a run, on every rank.

    train, eval: rows of data.train and data.eval.
    total_steps: length of the run in optimizer steps.
    stop_token_ids: tokens that end the model's turns, for generation_config.json of the export.
    """

    train: RowsT
    eval: RowsT | None
    total_steps: int
    stop_token_ids: tuple[int, ...]

    @abstractmethod
    def fingerprints(self) -> list[Fingerprint]:
        """Return fingerprints of all that a resumed run must not change, as it decides what a step learns."""

    def evaluation_fingerprints(self) -> list[Fingerprint]:
        """Return fingerprints of what a resumed run may change, but what must be the same on all ranks."""
        if self.eval is None:
            return []
        return [Fingerprint("the content of data.eval", self.eval.fingerprint, "a file of data.eval")]

    def rejects(self, data: DataConfig) -> RejectsOfRun:
        """Return the bad rows of both splits."""
        return RejectsOfRun.of(data, self.train.rejects, self.eval.rejects if self.eval else ())


ConfigT = TypeVar("ConfigT", bound=Config)
DataT = TypeVar("DataT", bound=Data)


def with_rows(config: ConfigT, rows: Mapping[str, GivenRows | None]) -> ConfigT:
    """Return the configuration with files of the rows, below the folder of tokenized rows, which this writes.

    rows: rows by split, like those of `Session`.
    Raises UserError. Enters no collective.
    """
    files = {}
    for split, given in rows.items():
        if given is not None:
            if named := getattr(config.data, split):
                raise UserError(
                    f"data.{split}={list(named)} and rows of {split} are given: leave out the one or the other"
                )
            files[split] = (keep_rows(given, split, cache_folder(config) / "rows"),)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **files))


class Session(contextlib.ExitStack, Generic[ConfigT, DataT]):
    """A run on every rank, from its checks to its end. Its parts are closed in the reverse order of their opening.

    run_name: name of the default output folder, `runs/<run_name>`.
    load_data: function that reads the rows. Enters no collective.
    check: function that refuses a configuration before the model's files are read. Enters no collective.
    rows: rows of the program's memory in place of data.train and data.eval, by "train" and "eval"; None: none.
    config: the given configuration, with the files of these rows, and a data.date if a chat template asks for one.

    Raises UserError for mistakes of the user. Before `open_folder` only the cache of tokenized rows is written.
    """

    def __init__(
        self,
        config: ConfigT,
        run_name: str,
        load_data: Callable[[ConfigT, Architecture], DataT],
        check: Callable[[ConfigT], object] = lambda config: None,
        rows: Mapping[str, GivenRows | None] = {},
    ):
        super().__init__()
        device.check_fallback(config.train.device)
        check(config)
        self.source = resolve(config)
        check_folder(config, run_name, self.source.arch)
        self.config, self._run_name = with_date(with_rows(config, rows), run_name), run_name
        self.data = load_data(self.config, self.source.arch)
        config.train.profiled(self.data.total_steps)
        self._fingerprints: list[Fingerprint] = []
        self.pin(*self.data.fingerprints())

    def pin(self, *fingerprints: Fingerprint) -> None:
        """Add fingerprints to checkpoints. Raises UserError if the checkpoint that the run resumes has others."""
        check_fingerprints(self.config, self._run_name, fingerprints)
        self._fingerprints += fingerprints

    def open_engine(self) -> Engine:
        """Join the world and build the engine. Raises UserError on every rank if ranks were given different inputs."""
        fingerprints = [
            *self._fingerprints,
            *self.data.evaluation_fingerprints(),
            *function_fingerprints(self.config.functions),
        ]
        check_ranks_agree(self.config, self._run_name, self.source, fingerprints)
        engine = Engine(self.config, self.source)
        engine.stop_token_ids = self.data.stop_token_ids
        return engine

    def open_folder(self) -> Path:
        """Create the run's folder. One broadcast over the world."""
        return self.enter_context(open_folder(self.config, self._run_name, self.data.total_steps))

    def open_run(self, engine: Engine, output_dir: Path, watched: Watched, callbacks: Callbacks = NO_CALLBACKS) -> Run:
        """Start the run, or resume it. Collective over the world."""
        about = self.data.total_steps, self._fingerprints, watched, callbacks
        return self.enter_context(Run(engine, self.config, output_dir, *about))
