"""How a run of any recipe begins: checks that a rank makes alone, the cheapest first; its data; the ranks meet and make
the engine; and when nothing speaks against it, the folder is made and the run begins."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from isoloss.engine.config.schema import Config, DataConfig
from isoloss.engine.data.bad_rows import Reject, RejectsOfRun
from isoloss.engine.run.folder import Fingerprint, check_fingerprints, check_folder, open_folder, with_date
from isoloss.engine.run.health import Watched
from isoloss.engine.run.rank_agreement import check_ranks_agree, of_functions
from isoloss.engine.run.run import Run
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import resolve
from isoloss.models.architecture import Architecture
from isoloss.parallel.runtime import device


class Rows(Protocol):
    """fingerprint: a digest of all that is learned from the rows. rejects: bad rows that were left out."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def rejects(self) -> Sequence[Reject]: ...


RowsT = TypeVar("RowsT", bound=Rows)


@dataclass(frozen=True)
class Data(ABC, Generic[RowsT]):
    """What a recipe learns from, on every rank.

    train, eval: the rows of data.train and data.eval.
    total_steps: length of the run in optimizer steps.
    stop_token_ids: tokens that end what the model says, which its export names.
    """

    train: RowsT
    eval: RowsT | None
    total_steps: int
    stop_token_ids: tuple[int, ...]

    @abstractmethod
    def fingerprints(self) -> list[Fingerprint]:
        """What must stay the same when the run goes on: it decides what a step sees and learns."""

    def of_evaluation(self) -> list[Fingerprint]:
        """Of what may change when a run goes on, and not from rank to rank."""
        if self.eval is None:
            return []
        return [Fingerprint("the content of data.eval", self.eval.fingerprint, "a file of data.eval")]

    def rejects(self, data: DataConfig) -> RejectsOfRun:
        return RejectsOfRun.of(data, self.train.rejects, self.eval.rejects if self.eval else ())


ConfigT = TypeVar("ConfigT", bound=Config)
DataT = TypeVar("DataT", bound=Data)


class Session(contextlib.ExitStack, Generic[ConfigT, DataT]):
    """A run, from its checks to its end, on every rank. What is opened in it is closed in reverse order.

    run_name: names the default output folder, `runs/<run_name>`.
    load_data: reads the rows; check: what can be refused before the model's files are read. Both enter no collective.
    config: the one given, with a data.date where a chat template asks for one.

    Raises UserError for what the user can fix; before `open_folder` nothing but the cache of tokenized rows is written.
    """

    def __init__(
        self,
        config: ConfigT,
        run_name: str,
        load_data: Callable[[ConfigT, Architecture], DataT],
        check: Callable[[ConfigT], object] = lambda config: None,
    ):
        super().__init__()
        device.check_fallback(config.train.device)
        check(config)
        self.source = resolve(config)
        check_folder(config, run_name, self.source.arch)
        self.config, self._run_name = with_date(config, run_name), run_name
        self.data = load_data(self.config, self.source.arch)
        config.train.profiled(self.data.total_steps)
        self._fingerprints: list[Fingerprint] = []
        self.pin(*self.data.fingerprints())

    def pin(self, *fingerprints: Fingerprint) -> None:
        """Let checkpoints hold these as well. Raises UserError if the one that the run goes on from has others."""
        check_fingerprints(self.config, self._run_name, fingerprints)
        self._fingerprints += fingerprints

    def open_engine(self) -> Engine:
        """The engine, on ranks that were all given the same. Joins the world. Raises UserError on every rank."""
        given = [*self._fingerprints, *self.data.of_evaluation(), *of_functions(self.config.functions)]
        check_ranks_agree(self.config, self._run_name, self.source, given)
        engine = Engine(self.config, self.source)
        engine.stop_token_ids = self.data.stop_token_ids
        return engine

    def open_folder(self) -> Path:
        """The run's folder. One broadcast over the world."""
        return self.enter_context(open_folder(self.config, self._run_name))

    def open_run(self, engine: Engine, output_dir: Path, watched: Watched) -> Run:
        """Collective over the world."""
        total_steps = self.data.total_steps
        return self.enter_context(Run(engine, self.config, output_dir, total_steps, self._fingerprints, watched))
