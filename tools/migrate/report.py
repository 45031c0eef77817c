"""Write the report and the preset of a migration."""

import shlex
import textwrap
from collections.abc import Sequence

import yaml

from isoloss.tools.migrate.result import Migration

WIDTH = 118


def report(result: Migration, written: str | None) -> str:
    """Return the report. written: the file that holds the keys instead, if any."""
    account = result.account
    if written is None:
        keys = [shlex.quote(line) for line in result.lines]
        start = [f"Keys for isoloss-{result.recipe}:", "", *keys]
    else:
        start = [
            f"Wrote {written}. Put it into recipes/conf/{result.recipe}/preset/ and start isoloss-{result.recipe} with "
            "preset=NAME, its name without .yaml.",
        ]
    parts = [
        _grouped("What changes the result", account.changes),
        "\n".join(start),
        _list("Give these before you run", result.before),
        _list("Not read, because it stands in another file", result.unread),
        _loss(result),
        _list("What your old run computed, by its release", result.past),
        _list("Translated", account.translated),
        _list(f"Not named: {result.trainer}'s defaults, which are not those of the preset", account.implied),
        _list("The same by default", account.same),
        _grouped("No counterpart, and what we do instead", account.without),
        _list("Unknown", account.unknown),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def past_report(name: str, lines: Sequence[str]) -> str:
    return _list(f"What a run of {name} computed", lines) + "\n"


def preset(result: Migration, origin: str) -> str:
    """Return a preset of the recipe. origin: the name of the source."""
    head = f"# @package _global_\n# From {origin}, a configuration of {result.trainer}.\n"
    return head + yaml.safe_dump(result.preset, sort_keys=False)


def _loss(result: Migration) -> str:
    lines = [f"{result.trainer}: {result.theirs.words()}", f"isoloss: {result.ours.words()}"]
    if result.differs:
        lines += [f"they differ: {why}" for why in result.differs]
        lines += [result.example] if result.example else []
    else:
        lines.append("the same number on every step, up to rounding")
    return _list("The loss, and the step", [*lines, *result.remarks])


def _grouped(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    """List each reason once, with its keys."""
    reasons = dict.fromkeys(why for _, why in pairs)
    return _list(title, [f"{why}:\n{_keys([key for key, reason in pairs if reason == why])}" for why in reasons])


def _keys(keys: Sequence[str]) -> str:
    return "\n".join(f"      {key}" for key in keys)


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return "\n".join([f"{title}:", "", *map(_wrapped, lines)])


def _wrapped(line: str) -> str:
    first, *rest = line.split("\n")
    filled = textwrap.fill(
        first, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join([filled, *rest])
