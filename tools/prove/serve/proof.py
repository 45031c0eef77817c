"""The rows of the proof: a line for each layout and each disturbance, and proof.json."""

import argparse
import dataclasses
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from isoloss.engine.config import rules
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import Layout
from isoloss.parallel.layout import MODEL_AXES
from isoloss.recipes import launch
from isoloss.tools.prove.rank_pool import WorkerPool
from isoloss.tools.prove.serve import session
from isoloss.tools.prove.serve.connection import UNDISTURBED, Connection, Disturbance, SessionError
from isoloss.tools.prove.serve.on_engine import play_on_engine
from isoloss.tools.prove.serve.player import Difference, Record, compare, play
from isoloss.tools.prove.serve.server import Killer, Server
from isoloss.tools.serve.config import ServeConfig

LAYOUTS = "tp2,pp2,dp2,ulysses2,ring2,ep2"
# Relative error of losses and norms. Rounding grows from step to step, in fp32 to a share of the steps themselves.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-3}
CLIENTS = 2  # whose numbers are compared; others disturb them
KILLS, KILLS_OF_A_SESSION = 3, 5
# Of the model with experts for layouts with ep or etp, where no model is given: otherwise that of the demonstration.
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Row:
    """A line of the certificate. bits: whether the numbers must agree in every bit, or up to rounding.

    against: None where the session did not come to its end, of which `reason` has the line.
    """

    name: str
    bits: bool
    against: Difference | None
    passed: bool
    reason: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Run the proof of the command line: print a line a row, write proof.json, and return the exit status.

    Raises UserError, before any server starts, for a mistake in the arguments or the configuration.
    """
    layouts = [whole(Layout.parse(text)) for text in (arguments.layouts or LAYOUTS).split(",")]
    rows = []
    with tempfile.TemporaryDirectory(prefix="isoloss-proof-") as folder:
        own = any(word.startswith("model.path=") for word in arguments.overrides)
        apart = [] if own else [each for each in layouts if each.ep * each.etp > 1]
        dense = [each for each in layouts if each not in apart]
        models = [("", dense, ())] if dense or not apart else []
        models += (
            [(", with experts", apart, (f"model.path={with_experts(Path(folder))}", *FROM_SCRATCH))] if apart else []
        )
        proofs = []
        for k, (of_model, of_layouts, words) in enumerate(models):
            words = (*words, *arguments.overrides, *precise(arguments.precision))
            check(words, of_layouts)
            proofs.append(Proof(words, of_layouts, arguments, Path(folder) / str(k), of_model))
        for k, proof in enumerate(proofs):
            for row in proof.rows(disturbed=k == 0):
                print(line(row), flush=True)
                rows.append(row)
    return report(rows, arguments)


FROM_SCRATCH = ("model.from_scratch=true", "serve.name=experts", "batch.max_tokens=4096")


def with_experts(folder: Path) -> Path:
    """Write the folder of a small model with experts."""
    config = json.loads((launch.ASSETS / "tiny/config.json").read_text())
    made = folder / "experts"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({**config, **EXPERTS}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (made / name).write_bytes((launch.ASSETS / "tiny" / name).read_bytes())
    return made


def whole(layout: Layout) -> Layout:
    """Return a layout with the ranks that its experts need."""
    return layout.with_world(max(layout.world_size, layout.fewest_ranks))


def precise(precision: str) -> tuple[str, ...]:
    own = ("parallel.distributed_optimizer=false",) if precision == "fp64" else ()
    return (f"train.precision={precision}", "serve.max_models=10000", *own)


def of_layout(layout: Layout) -> tuple[str, ...]:
    degrees = [f"parallel.{axis}={getattr(layout, axis)}" for axis in MODEL_AXES]
    sequence_parallel = f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}"
    return (*degrees, sequence_parallel, f"serve.ranks={layout.world_size}")


def check(words: Sequence[str], layouts: Sequence[Layout]) -> None:
    """Raise UserError for a configuration that a server would refuse."""
    for layout in (Layout(), *layouts):
        config, *_ = launch.compose_config("serve", ServeConfig, [*words, *of_layout(layout)])
        rules.check(config.of_engine(), read_architecture(config.model.path), layout)


class Proof:
    """The rows of one model."""

    def __init__(
        self, words: Sequence[str], layouts: Sequence[Layout], arguments: argparse.Namespace, folder: Path, suffix: str
    ):
        self._words, self._layouts, self._folder, self._suffix = words, layouts, folder, suffix
        self._tolerance, self._seed = TOLERANCE[arguments.precision], arguments.seed or 0
        self._kills = KILLS if arguments.kills is None else arguments.kills
        config, *_ = launch.compose_config("serve", ServeConfig, words)
        arch = read_architecture(config.model.path)
        self._name = config.name
        # Those behind the first CLIENTS are there to disturb them.
        self._clients = session.clients(5, arch.vocab_size, arch.max_positions, self._seed)
        self._servers, self._of_layout = 0, {}

    def rows(self, *, disturbed: bool) -> Iterator[Row]:
        """Yield the rows, once each is done. disturbed: False for those of the layouts alone."""
        with self._server(Layout()) as server:
            try:
                alone = self._play(server)
            except SessionError as error:
                yield Row(f"1 rank{self._suffix}", True, None, False, str(error))
                return
            yield from self._reference_rows(alone)
            if disturbed:
                yield from self._disturbed_rows(server, alone)
            if server.repeated_otherwise():
                yield Row("one result for each request", True, None, False, "the server found two")
        for layout in self._layouts:
            yield self._row(str(layout), False, partial(self._on_layout, layout), alone)
        if disturbed and self._kills:
            yield from self._kill_rows(alone)

    def _reference_rows(self, alone: Record) -> Iterator[Row]:
        clients = self._clients[:CLIENTS]
        with WorkerPool(1) as pool:
            expected = pool.run(1, play_on_engine, self._words, clients, alone)[0]
        read = {label: numbers for label, numbers in alone.items() if "tokens" in numbers}
        trained = {label: numbers for label, numbers in alone.items() if label not in read}
        yield self._compared("1 rank against a loop over Engine", True, expected, trained)
        yield self._compared("completions read again", False, expected, read)
        again = {f"client {k} continue {place}": alone[f"client {k} again {what}"] for k in range(CLIENTS)
                 for place, what in enumerate(("first call", "forward", "second call", "step"))}  # fmt: skip
        yield self._compared("continued from save_state", True, alone, again)

    def _disturbed_rows(self, server: Server, alone: Record) -> Iterator[Row]:
        for count in (2, 5):
            found = partial(self._play, server, clients=count, together=True)
            yield self._row(f"{count} training clients at a time", True, found, alone)
        parts_of_7: Record = {}

        def in_parts_of_7() -> Record:
            parts_of_7.update(self._play(server, Disturbance(chunk=7), together=True))
            return parts_of_7

        yield self._row("calls in parts of 7 datums", False, in_parts_of_7, alone)
        for name, bits, disturbance, expected in (
            ("the same in an order of chance", True, Disturbance(chunk=7, shuffled=True), parts_of_7),
            ("calls in parts of 1 datum", False, Disturbance(chunk=1), alone),
            ("calls in parts of 1024 datums", True, Disturbance(chunk=1024), alone),
            ("answers lost, requests sent again", True, Disturbance(lost=1 / 3), alone),
            ("requests that arrive twice", True, Disturbance(doubled=1 / 2), alone),
            ("requests in an order of chance", True, Disturbance(shuffled=True), alone),
        ):
            yield self._row(name, bits, partial(self._play, server, disturbance, together=True), expected)

    def _kill_rows(self, alone: Record) -> Iterator[Row]:
        """Yield a row for every session with kills, on the first layout."""
        layout = next(iter(self._layouts), Layout())
        expected = self._of_layout.get(layout, alone if layout == Layout() else None)
        if expected is None:
            return
        draw = random.Random(self._seed)
        sessions = math.ceil(self._kills / KILLS_OF_A_SESSION)
        for k in range(sessions):
            count = min(KILLS_OF_A_SESSION, self._kills - k * KILLS_OF_A_SESSION)
            seed = draw.randrange(1 << 30)
            name = f"{layout}, {count} x SIGKILL, session {k + 1} of {sessions}"
            yield self._row(name, True, partial(self._killed, layout, count, seed), expected)

    def _killed(self, layout: Layout, count: int, seed: int) -> Record:
        answers = 2 * sum(len(client.requests) for client in self._clients[:CLIENTS])
        points = sorted(random.Random(seed).sample(range(1, answers), count))
        with self._server(layout, "serve.save_every=3", again=True) as server:
            killer = Killer(server, points, seed)
            record = self._play(server, together=True, heard=killer.heard)
            if killer.kills() < count:
                raise SessionError(f"{killer.kills()} of {count} kills took place")
            if server.repeated_otherwise():
                raise SessionError("a request had another result when it was repeated")
        return record

    def _on_layout(self, layout: Layout) -> Record:
        with self._server(layout) as server:
            self._of_layout[layout] = self._play(server)
        return self._of_layout[layout]

    def _server(self, layout: Layout, *words: str, again: bool = False) -> Server:
        self._servers += 1
        folder = self._folder / f"server-{self._servers}"
        return Server([*self._words, *of_layout(layout), *words], folder, again=again)

    def _play(
        self,
        server: Server,
        disturbance: Disturbance = UNDISTURBED,
        *,
        clients: int = CLIENTS,
        together: bool = False,
        heard: Callable[[], None] = lambda: None,
    ) -> Record:
        def connect(number: int) -> Connection:
            return Connection(
                server.url, server.key, disturbance, seed=self._seed + number, check=server.check, heard=heard
            )

        return play(self._clients[:clients], self._name, connect, together=together)

    def _row(self, name: str, bits: bool, found: Callable[[], Record], expected: Record) -> Row:
        try:
            return self._compared(name, bits, found(), expected)
        except SessionError as error:
            return Row(name + self._suffix, bits, None, False, str(error))

    def _compared(self, name: str, bits: bool, found: Record, expected: Record) -> Row:
        against = compare(found, expected)
        passed = against.unequal == 0 if bits else against.within(self._tolerance)
        return Row(name + self._suffix, bits, against, passed)


def line(row: Row) -> str:
    head = f"{'pass' if row.passed else 'FAIL'}  {row.name:48} "
    against = row.against
    if against is None:
        return f"{head}{row.reason}"
    if row.bits and row.passed:
        return f"{head}{against.values} numbers equal in bits"
    differ = f", first at {against.first}" if against.first and not row.passed else ""
    return (
        f"{head}loss {against.loss:.1e}  norm {against.grad_norm:.1e}  log-probability {against.logprobs:.1e}  "
        f"{against.unequal} of {against.values} numbers differ{differ}"
    )


def report(rows: Sequence[Row], arguments: argparse.Namespace) -> int:
    """Write proof.json, print the verdict, and return the exit status: 0 if every row passed, else 1."""
    passed = sum(row.passed for row in rows)
    out = arguments.out or Path("runs/proof-serve")
    out.mkdir(parents=True, exist_ok=True)
    certificate = {
        "proved": passed == len(rows),
        "precision": arguments.precision,
        "tolerance": TOLERANCE[arguments.precision],
        "seed": arguments.seed or 0,
        "keys": arguments.overrides,
        "versions": {name: version(name) for name in ("isoloss", "torch", "megatron-core")},
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (out / "proof.json").write_text(json.dumps(certificate, indent=2) + "\n")
    verdict = "proved" if passed == len(rows) else "NOT proved"
    print(f"{verdict}: {passed} of {len(rows)} rows agree; certificate in {out}")
    return 0 if passed == len(rows) else 1
