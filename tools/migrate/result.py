"""Migrate a configuration of another trainer: check the result, account for every key, and compare the losses."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from isoloss.engine.config.parse import defaults, known_keys
from isoloss.parallel import UserError
from isoloss.recipes.launch import RECIPES, compose_config
from isoloss.tools.migrate import releases
from isoloss.tools.migrate.denominator import Denominator, example
from isoloss.tools.migrate.settings import UNSET, Settings
from isoloss.tools.migrate.table import NO_DISTILLATION, Recipe, Source

UNQUOTED = re.compile(r"[A-Za-z_./@+][\w./@+:-]*")
MAPPINGS = ("data.template_kwargs", "data.columns")


@dataclass(frozen=True)
class Account:
    """An account of every key that a configuration names. Each line begins with the key.

    changes: keys by which the run learned something else. give: keys whose meaning the user must give otherwise.
    without: keys without a counterpart. These three are pairs of a line and a reason. translated: keys that became
    keys of isoloss. same: keys that ask for isoloss's defaults. unknown: names that the trainer does not have.
    implied: keys of isoloss that the trainer's defaults decide.
    """

    changes: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    give: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    without: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    translated: list[str] = dataclasses.field(default_factory=list)
    same: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    implied: list[str] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Migration:
    """The result of a migration.

    trainer: the name of the source's trainer. recipe: the recipe of isoloss. lines: `key=value` after the recipe's
    plain preset. preset: all keys that are not isoloss's defaults, for a preset of one's own. account: the account of
    the source's keys. theirs, ours: the denominators of the losses. differs: the differences of these. remarks: lines
    on the loss. before: lines on keys that the user must still give. unread: parts of a script that were not read.
    past: lines on the loss of the given release.
    """

    trainer: str
    recipe: Recipe
    lines: list[str]
    preset: dict[str, Any]
    account: Account
    theirs: Denominator
    ours: Denominator
    differs: list[str]
    remarks: list[str]
    before: list[str]
    unread: list[str]
    past: list[str]

    @property
    def status(self) -> int:
        return 1 if self.account.unknown else 3 if self.changes else 0

    @property
    def changes(self) -> list[str]:
        return [f"{shown}: {why}" for shown, why in self.account.changes]

    @property
    def example(self) -> str | None:
        return example(self.theirs, self.ours)


def migrate(source: Source, given: Mapping[str, Any], unread: list[str], release: str | None = None) -> Migration:
    """Migrate the values that a configuration gives.

    release: the day of the trainer's release that ran. Raises UserError where the source is no configuration of that
    trainer, or isoloss refuses the result."""
    settings = source.settings(given)
    outcome = account(source, settings, {})  # raises if it is no configuration of that trainer
    recipe = source.recipe(settings)
    kind = RECIPES[recipe].config
    values = flat(defaults(kind)) | translate(source, settings, known_keys(kind))
    plain = flat(compose_config(recipe, kind, ["preset=plain", "model.path=MODEL"])[1]) | {"model.path": ""}
    emitted = {key: f"{key}={text(value)}" for key, value in values.items() if value != plain[key]}
    model = [] if values["model.path"] else ["model.path=MODEL"]
    try:
        config, _, _ = compose_config(recipe, kind, ["preset=plain", *model, *emitted.values()])
    except UserError as error:
        raise _refusal(source, outcome, error) from None
    unset = flat(defaults(kind))
    theirs, loss = source.loss(settings), config.loss
    ours = Denominator(loss.aggregation, length=loss.norm_length, count_fully_masked=loss.count_fully_masked)
    outcome = account(source, settings, emitted)
    path = values["model.path"]
    missing = [] if path.startswith(("/", ".", "~")) else [f"model.path: a folder{f' with {path}' if path else ''}"]
    return Migration(
        source.trainer,
        recipe,
        list(emitted.values()),
        nested({key: value for key, value in values.items() if value != unset[key]}),
        outcome,
        theirs,
        ours,
        theirs.differs(ours),
        source.remarks(settings),
        missing + source.before(settings) + [f"{shown}: {why}" for shown, why in outcome.give],
        unread,
        releases.describe(source.trainer.lower(), release, *source.past(settings)) if release else [],
    )


def translate(source: Source, settings: Settings, known: Collection[str]) -> dict[str, Any]:
    """Return the keys that the configuration or its trainer's defaults decide. known: keys of the recipe."""
    values = {key: source.ours[key](settings) for key in known if key in source.ours}
    return {key: value for key, value in values.items() if value is not UNSET}


def account(source: Source, settings: Settings, emitted: Mapping[str, str]) -> Account:
    """Say where each key went. emitted: the lines that are written, by the key of isoloss. Raise UserError where no key
    is the trainer's."""
    outcome, named = Account(), set()
    for key, value in settings.given.items():
        row, shown = source.row_of(key), f"{key}={_shown(value)}"
        if row is None:
            outcome.unknown.append(shown)
            continue
        decided = [ours for ours, _, other in (name.partition("|") for name in row.to) if not settings.has(other)]
        lines = [emitted[ours] for ours in decided if ours in emitted]
        named |= set(decided)
        if reason := row.reason(settings, value):
            {"result": outcome.changes, "give": outcome.give, "nothing": outcome.without}[row.matter].append(
                (shown, reason)
            )
        elif lines:
            outcome.translated.append(f"{shown} -> {' '.join(lines)}")
        else:
            outcome.same.append(shown)
    for row in source.rows:  # defaults that isoloss's are not
        if row.matter != "result" or not row.to or row.key in settings.given:
            continue
        if reason := row.reason(settings, row.default):
            outcome.changes.append((f"{row.key}={_shown(row.default)}, {source.trainer}'s default", reason))
    if len(outcome.unknown) == len(settings.given):
        raise UserError(f"this is not a configuration of {source.trainer}: it has none of its keys")
    outcome.implied.extend(line for ours, line in emitted.items() if ours not in named)
    return outcome


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(_shown, value))}]" if isinstance(value, list) else str(value)


def _refusal(source: Source, outcome: Account, error: UserError) -> UserError:
    """Return the error that names a key without which the result is not the user's run, before isoloss's refusal."""
    if not outcome.changes:
        return error
    teacher = next((change for change in outcome.changes if change[1] == NO_DISTILLATION), None)
    shown, why = teacher or outcome.changes[0]
    rest = "" if teacher else f"; what is left is refused: {error}"
    return UserError(f"{source.trainer}: {shown}: {why}{rest}")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted keys. A mapping that is the value of a key of MAPPINGS stays one."""
    values = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in MAPPINGS:
            values |= flat(value, f"{key}.")
        else:
            values[key] = value
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        group, dot, name = key.rpartition(".")
        (tree.setdefault(group, {}) if dot else tree)[name] = value
    return tree


def text(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(text, value))}]"
    if isinstance(value, str):
        plain = UNQUOTED.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf")
        return value if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
