"""A configuration of ours from one of another trainer's: checked, accounted for, and its loss compared."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isoloss.engine.config.parse import defaults, known_keys
from isoloss.parallel import UserError
from isoloss.recipes.launch import RECIPES, compose_config
from isoloss.tools.migrate import releases
from isoloss.tools.migrate.denominator import Denominator, example
from isoloss.tools.migrate.table import NO_DISTILLATION, Account, Recipe, Settings, Source, account, translate

UNQUOTED = re.compile(r"[A-Za-z_./@+][\w./@+:-]*")


@dataclass(frozen=True)
class Migration:
    """trainer: whose configuration it was. recipe: which of ours it becomes. lines: `key=value` after the recipe's
    plain preset. preset: all keys that are not our defaults, for a preset of one's own. account: of its keys. theirs,
    ours: what each divides its loss by. differs: where the numbers are not the same. remarks: on the loss. before: what
    must still be given. unread: parts of a script that were passed over.
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
    past: list[str]  # what a run of that release computed

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
    """release: the day of the trainer's that ran. Raises UserError where it is no configuration of that trainer, or
    ours refuses what comes of it."""
    settings = Settings(source.trainer, given, source.rows)
    told = account(source, settings, {})  # is it one of that trainer's at all?
    recipe = source.recipe(settings)
    kind = RECIPES[recipe].config
    theirs = translate(source, settings)
    values = flat(defaults(kind)) | {key: value for key, value in theirs.items() if key in known_keys(kind)}
    plain = flat(compose_config(recipe, kind, ["preset=plain", "model.path=MODEL"])[1]) | {"model.path": ""}
    emitted = {key: f"{key}={text(value)}" for key, value in values.items() if value != plain[key]}
    model = [] if values["model.path"] else ["model.path=MODEL"]
    try:
        config, _, _ = compose_config(recipe, kind, ["preset=plain", *model, *emitted.values()])
    except UserError as error:
        raise _refusal(source, told, error) from None
    unset = flat(defaults(kind))
    denominator, remarks = source.loss(settings)
    loss = config.loss
    ours = Denominator(loss.aggregation, length=loss.norm_length, count_fully_masked=loss.count_fully_masked)
    told = account(source, settings, emitted)
    path = values["model.path"]
    missing = [] if path.startswith(("/", ".", "~")) else [f"model.path: a folder{f' with {path}' if path else ''}"]
    return Migration(
        source.trainer,
        recipe,
        list(emitted.values()),
        nested({key: value for key, value in values.items() if value != unset[key]}),
        told,
        denominator,
        ours,
        denominator.differs(ours),
        remarks,
        missing + source.before(settings) + [f"{shown}: {why}" for shown, why in told.give],
        unread,
        releases.told(source.trainer.lower(), release, *source.past(settings)) if release else [],
    )


def _refusal(source: Source, told: Account, error: UserError) -> UserError:
    """What is refused without a key that decides what is learned was not what the run needed: that key comes first."""
    if not told.changes:
        return error
    teacher = next((change for change in told.changes if change[1] == NO_DISTILLATION), None)
    shown, why = teacher or told.changes[0]
    rest = "" if teacher else f"; what is left is refused: {error}"
    return UserError(f"{source.trainer}: {shown}: {why}{rest}")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a configuration; a mapping that is a value of ours stays one."""
    values = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key != "data.template_kwargs":
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
    """As Hydra reads it."""
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
