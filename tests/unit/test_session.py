"""A run begins in one order, whatever it learns: cheap checks, data, the other ranks, and only then what is written."""

import contextlib
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from isoloss.engine.config.schema import Config, DataConfig, ModelConfig
from isoloss.engine.run import session
from isoloss.engine.run.callbacks import Callbacks
from isoloss.engine.run.folder import Fingerprint
from isoloss.engine.run.health import Watched
from isoloss.engine.run.session import Data, Session
from isoloss.parallel import UserError

ROWS, EVALUATED, PINNED = (Fingerprint(name, name, "a file") for name in ("rows", "the content of data.eval", "pinned"))
CONFIG = Config(ModelConfig("somewhere"))
DATED = replace(CONFIG, data=DataConfig(date="2026-11-28"))
ALONE = [
    "check_fallback auto", "check", "resolve", "check_folder sft-tiny", "with_date", "load_data 2026-11-28",
    "check_fingerprints rows",
]  # fmt: skip
BEGUN = [
    *ALONE, "check_ranks_agree rows, the content of data.eval", "Engine", "open_folder sft-tiny",
    "Run of 7 steps, rows", "loop", "Run ends", "open_folder ends",
]  # fmt: skip


@dataclass(frozen=True)
class Rows:
    fingerprint: str
    rejects: tuple = ()


class OwnData(Data[Rows]):
    def fingerprints(self):
        return [ROWS]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What is called, in order. Nothing of it does anything."""
    made: list[str] = []

    def names(fingerprints) -> str:
        return ", ".join(each.name for each in fingerprints)

    @contextlib.contextmanager
    def opened(name, shown, value):
        made.append(shown)
        yield value
        made.append(f"{name} ends")

    source = SimpleNamespace(arch="arch")
    stands_for = {
        "resolve": lambda config: made.append("resolve") or source,
        "check_folder": lambda config, name, arch: made.append(f"check_folder {name}"),
        "with_date": lambda config, name: made.append("with_date") or DATED,
        "check_fingerprints": lambda config, name, given: made.append(f"check_fingerprints {names(given)}"),
        "check_ranks_agree": lambda config, name, of, given: made.append(f"check_ranks_agree {names(given)}"),
        "Engine": lambda config, of: made.append("Engine") or SimpleNamespace(config=config, source=of),
        "open_folder": lambda config, name, steps: opened("open_folder", f"open_folder {name}", "the folder"),
        "Run": lambda engine, config, folder, steps, given, watched, callbacks: opened(
            "Run", f"Run of {steps} steps, {names(given)}", (engine, config, folder, watched, callbacks)
        ),
    }
    for name, function in stands_for.items():
        monkeypatch.setattr(session, name, function)
    monkeypatch.setattr(session.device, "check_fallback", lambda wanted: made.append(f"check_fallback {wanted}"))
    return made


def begin(calls) -> Session[Config, OwnData]:
    def load_data(config, arch):
        calls.append(f"load_data {config.data.date}")
        return OwnData(Rows("train"), Rows("eval"), 7, (3, 5))

    return Session(CONFIG, "sft-tiny", load_data, lambda config: calls.append("check"))


def test_the_order_in_which_a_run_begins_and_ends(calls):
    with begin(calls) as started:
        assert calls == ALONE, "the ranks meet later, and nothing is written yet"
        engine, watched, callbacks = started.open_engine(), Watched(), Callbacks()
        run = started.open_run(engine, started.open_folder(), watched, callbacks)
        calls.append("loop")
    assert calls == BEGUN and run == (engine, DATED, "the folder", watched, callbacks)
    assert engine.config is DATED and engine.source is started.source and engine.stop_token_ids == (3, 5)


def test_what_a_recipe_opens_and_pins_beside(calls):
    with begin(calls) as started:
        started.enter_context(contextlib.closing(SimpleNamespace(close=lambda: calls.append("servers end"))))
        engine = started.open_engine()
        started.pin(PINNED)
        started.open_run(engine, started.open_folder(), Watched())
        calls.append("loop")
    agreed = BEGUN.index("Engine") + 1
    assert calls == [
        *BEGUN[:agreed], "check_fingerprints pinned", "open_folder sft-tiny", "Run of 7 steps, rows, pinned",
        *BEGUN[-3:], "servers end",
    ]  # fmt: skip


@pytest.mark.parametrize("refuses", ["resolve", "check_folder", "check_fingerprints", "check_ranks_agree"])
def test_after_a_refusal_nothing_more_is_done(calls, monkeypatch, refuses):
    def refuse(*args):
        raise UserError(f"{refuses} refuses")

    monkeypatch.setattr(session, refuses, refuse)
    with pytest.raises(UserError, match=refuses), begin(calls) as started:
        started.open_engine()
    before = next(number for number, call in enumerate(BEGUN) if call.startswith(refuses))
    assert calls == BEGUN[:before]


@pytest.mark.parametrize("evaluated", [Rows("eval", ("bad row",)), None])
def test_rows_to_evaluate_on_may_be_missing(evaluated):
    data = OwnData(Rows("train"), evaluated, 7, ())
    ((_, _, of_train), (_, _, of_eval)) = data.rejects(CONFIG.data).splits
    assert of_train == () and of_eval == (("bad row",) if evaluated else ())
    assert [(each.name, each.value) for each in data.evaluation_fingerprints()] == [(EVALUATED.name, "eval")] * bool(
        evaluated
    )
