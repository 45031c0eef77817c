"""Read the tables of another trainer's keys: TOML files that name functions of the trainer's module.

They are in engine/config/trainers, where a run reads from them what to say of such a key on its command line.

A file `NAME.toml` has these sections; a wrong one raises ValueError when it is loaded.

[source]   trainer: its name; recipe: an expression; sizes: an expression for Sizes, or missing; include: a file
[keys]     a key of the source = {fields}, one a line:
             to       keys of isoloss that it decides, separated by spaces; `key|other`: only if `other` is not set
             as       expression for the value of the first of them
             default  the trainer's default, if it is not null
             why      what cannot be carried over, and what isoloss does instead; {expression} is filled in, and a
                      text that is then empty says nothing
             keeps    values of which nothing is lost ("null" is null)
             when     expression: whether something is lost
             matter   "result": it changes what is learned; "give": the user must give it otherwise; or neither
[changes], [give], [without]   keys without a counterpart, by the reason: what is done instead = [keys], or
             {keys = [keys], keeps = [values], when = expression}. matter is "result", "give" and neither. A key of
             [changes] also keeps null and false.
[ours]     a key of isoloss = expression, for those that more than one key of the source decides
[before]   what a user must still give = expression: when
[loss]     a field of Denominator = expression
[remarks]  a remark on the loss = expression: when
[past]     a kind of releases.toml = expression: whether the configuration has that loss

`name.*` and `--name-*` stand for all keys that begin so and have no row of their own. An expression is a function of
the trainer's module or of Settings, and its arguments: `integer data.max_length`. In a row, a function that lacks its
first key gets the row's. `not f`, `f and g`, and `f or 1` are expressions too: g or false, and 1 for what is false,
null or empty. `unset` leaves isoloss's default.
"""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isoloss.engine.config import elsewhere
from isoloss.tools.migrate.denominator import Denominator
from isoloss.tools.migrate.releases import Sizes
from isoloss.tools.migrate.settings import UNSET, Settings

Recipe = Literal["sft", "grpo", "dapo"]
Matter = Literal["nothing", "give", "result"]
Expression = Callable[[Settings], Any]
GROUPS: dict[str, Matter] = {"changes": "result", "give": "give", "without": "nothing"}
SECTIONS = {"source", "keys", "ours", "before", "loss", "remarks", "past", *GROUPS}
FIELDS = {
    "source": {"trainer", "recipe", "sizes", "include"},
    "loss": {field.name for field in dataclasses.fields(Denominator)},
    "keys": {"to", "as", "default", "why", "keeps", "when", "matter"},
    **{section: {"keys", "keeps", "when"} for section in GROUPS},
}
NO_DISTILLATION = "isoloss has no distillation: nothing is learned from a teacher"


@dataclass(frozen=True)
class Row:
    """A key of the source; the fields are those of the file."""

    key: str
    to: tuple[str, ...] = ()
    default: Any = None
    why: Callable[[Settings], str] | None = None
    keeps: Sequence[Any] = ()
    when: Expression | None = None
    matter: Matter = "nothing"

    def matches(self, key: str) -> bool:
        return key.startswith(self.key[:-1]) if self.key.endswith("*") else key == self.key

    def reason(self, settings: Settings, value: Any) -> str:
        """Return what is lost of this value of the key; empty if nothing is."""
        if self.to and self.keeps:
            value = settings(self.key)  # refuses a variable
        if self.why is None or value in self.keeps or (self.when is not None and not self.when(settings)):
            return ""
        return self.why(settings)


@dataclass(frozen=True)
class Source:
    """A kind of configuration.

    trainer: its name. rows: its keys. ours: an expression for each key of isoloss that it decides. recipe: isoloss's
    recipe. loss: the denominator of its loss. past: the sizes of its steps, and its kinds of releases.PASTS.
    before: lines on keys that the user must still give. remarks: lines on its loss.
    """

    trainer: str
    rows: tuple[Row, ...]
    ours: Mapping[str, Expression]
    recipe: Callable[[Settings], Recipe]
    loss: Callable[[Settings], Denominator]
    past: Callable[[Settings], tuple[Sizes, list[str]]]
    before: Callable[[Settings], list[str]]
    remarks: Callable[[Settings], list[str]]

    def settings(self, given: Mapping[str, Any]) -> Settings:
        return Settings(self.trainer, given, {row.key: row.default for row in self.rows})

    def row_of(self, key: str) -> Row | None:
        """Return the row of that very name, or the one of its longest group."""
        rows = [row for row in self.rows if row.matches(key)]
        return max(rows, key=lambda row: (not row.key.endswith("*"), len(row.key)), default=None)


def load(name: str, module: Mapping[str, Any], folder: Path = elsewhere.FOLDER) -> Source:
    """Return the source of `NAME.toml`. module: the namespace of its functions."""
    return _Loader(module, folder).load(name)


class _Loader:
    def __init__(self, module: Mapping[str, Any], folder: Path):
        self.module, self.folder, self.place = module, folder, ""
        self.rows: dict[str, Row] = {}
        self.texts: dict[str, list[tuple[Callable[[Settings], str], Expression]]] = {"before": [], "remarks": []}
        self.expressions: dict[str, dict[str, Expression]] = {"ours": {}, "loss": {}, "past": {}}
        self.named: list[tuple[str, str]] = []  # keys in expressions, with their places

    def load(self, name: str) -> Source:
        source = self._read(name)
        for place, key in self.named:
            if not any(row.matches(key) for row in self.rows.values()):
                raise ValueError(f"{place}: no row has the key {key!r}")
        before, remarks = (lambda s, pairs=pairs: [text(s) for text, when in pairs if when(s)]
                           for pairs in self.texts.values())  # fmt: skip
        recipe, ours, loss, past = self._expression(source["recipe"]), *self.expressions.values()
        sizes = self._expression(source["sizes"]) if "sizes" in source else lambda s: Sizes()
        return Source(
            source["trainer"],
            tuple(self.rows.values()),
            ours,
            recipe,
            lambda s: Denominator(**{field: value(s) for field, value in loss.items()}),
            lambda s: (sizes(s), [kind for kind, holds in past.items() if holds(s)]),
            before,
            remarks,
        )

    def _read(self, name: str) -> dict[str, Any]:
        """Add the rows of a file and of those that it includes. Return its section [source]."""
        file = f"{name}.toml"
        tables = tomllib.loads((self.folder / file).read_text())
        self.place = file
        self._check(tables, SECTIONS, "section")
        source = tables.pop("source", {})
        self._check(source, FIELDS["source"])
        if "include" in source:
            self._read(source["include"])
        for section, entries in tables.items():
            for entry, value in entries.items():
                self.place = f"{file}: [{section}] {entry}"
                if section in self.expressions:
                    self._check({entry: value}, FIELDS.get(section, {entry}))
                    self._named(section, entry, value)
                elif section in self.texts:
                    self.texts[section].append((self._text(entry), self._expression(value)))
                elif section == "keys":
                    self._row(entry, value)
                else:
                    self._group(section, entry, value if isinstance(value, dict) else {"keys": value})
        self.place = f"{file}: [source]"
        return source

    def _check(self, entries: Mapping[str, Any], known: set[str], noun: str = "field") -> None:
        if unknown := sorted(entries.keys() - known):
            raise ValueError(f"{self.place}: {noun} {unknown[0]!r} is none of {', '.join(sorted(known))}")

    def _row(self, key: str, fields: dict[str, Any]) -> None:
        self._check(fields, FIELDS["keys"])
        to, matter = fields.get("to", "").split(), fields.get("matter", "nothing")
        if not to and "why" not in fields:
            raise ValueError(f"{self.place}: has neither `to` nor `why`")
        if matter not in GROUPS.values():
            raise ValueError(f"{self.place}: matter {matter!r} is none of {', '.join(GROUPS.values())}")
        if "as" in fields:
            self._named("ours", to[0].partition("|")[0] if to else "", fields["as"], key)
        self._add(key, fields, to=tuple(to), default=fields.get("default"), matter=matter)

    def _group(self, section: str, why: str, fields: dict[str, Any]) -> None:
        self._check(fields, FIELDS[section])
        keeps = ["null", False] if section == "changes" else []
        if not fields.get("keys"):
            raise ValueError(f"{self.place}: names no keys")
        for key in fields["keys"]:
            self._add(key, {"why": why, **fields, "keeps": [*keeps, *fields.get("keeps", [])]}, matter=GROUPS[section])

    def _add(self, key: str, fields: Mapping[str, Any], **known: Any) -> None:
        if key in self.rows:
            raise ValueError(f"{self.place}: {key} has two rows")
        if "*" in key[:-1]:
            raise ValueError(f"{self.place}: {key}: `*` stands for the end of a name")
        self.rows[key] = Row(
            key,
            why=self._text(fields["why"], key) if "why" in fields else None,
            keeps=[None if value == "null" else value for value in fields.get("keeps", [])],
            when=self._expression(fields["when"], key) if "when" in fields else None,
            **known,
        )

    def _named(self, section: str, name: str, text: str, key: str = "") -> None:
        if name in self.expressions[section] or not name:
            raise ValueError(f"{self.place}: {name or 'no key of isoloss'} has {'two values' if name else 'a value'}")
        self.expressions[section][name] = self._expression(text, key)

    def _text(self, text: str, key: str = "") -> Callable[[Settings], str]:
        """Compile a text with {expressions}."""
        parts = re.split(r"\{([^{}]*)\}", text)
        filled = [self._expression(part, key) for part in parts[1::2]]
        return lambda s: "".join(
            f"{part}{value(s)}" for part, value in zip(parts[::2], [*filled, lambda s: ""])
        )  # fmt: skip

    def _expression(self, text: str, key: str = "") -> Expression:
        head, alternative, literal = text.partition(" or ")
        *conditions, call = [self._call(part, key) for part in head.split(" and ")]
        otherwise = int(literal) if literal.isdigit() else {"unset": UNSET, "null": None}.get(literal, literal)

        def evaluate(s: Settings) -> Any:
            value = call(s) if all(condition(s) for condition in conditions) else False
            empty = value is False or (not value and not isinstance(value, (int, float)))
            return otherwise if alternative and empty else value

        return evaluate

    def _call(self, text: str, key: str) -> Expression:
        negated, (name, *words) = text.startswith("not "), text.removeprefix("not ").split()
        function = self.module.get(name, getattr(Settings, name, None))
        if not inspect.isfunction(function) or name.startswith("_"):
            raise ValueError(f"{self.place}: there is no function {name!r}")
        parameters = inspect.signature(function)
        required = [
            p for p in parameters.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        words = [key, *words] if key and len(words) == len(required) - 2 and required[1].name == "key" else words
        try:
            arguments = parameters.bind(None, *words).arguments
        except TypeError as error:
            raise ValueError(f"{self.place}: {text}: {error}") from None
        for argument, value in arguments.items():
            if argument.endswith("key") or argument == "others":
                self.named += [(self.place, item) for item in ([value] if argument.endswith("key") else value)]
        return lambda s: not function(s, *words) if negated else function(s, *words)
