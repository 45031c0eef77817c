"""Compare two configurations, key by key.

    python -m isoloss.tools.config diff runs/sft-tiny runs/sft-tiny-2
    python -m isoloss.tools.config diff preset=8b_h100 my.yaml --recipe grpo

Each is a configuration file, the folder of a run, or preset=NAME. A file that lacks keys has them from its preset, as
in a run: `plain` if it names a model and no preset.
Exit status: 0 no key differs, 1 keys differ, 2 a mistake in the arguments or a file.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isoloss.engine.config.help import as_written
from isoloss.engine.config.parse import convert, key_types
from isoloss.engine.run.records import CONFIG
from isoloss.parallel import UserError
from isoloss.recipes.launch import RECIPES, compose_values
from isoloss.tools import command_line


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        words = [_override(text) for text in (arguments.first, arguments.second)]
        recipe, sides = _read(words, [arguments.recipe] if arguments.recipe else ["sft", "grpo"])
        rows = difference(RECIPES[recipe].config, *sides)
    except UserError as error:
        return command_line.tell_mistake(error)
    print(table([(f"key of {recipe}", arguments.first, arguments.second), *rows]) if rows else "no key differs")
    return 1 if rows else 0


def difference(cls: Any, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys whose values differ, with both values as a command line has them. Raises UserError for a value of
    a wrong type."""
    pairs = [
        (key, convert(kind, _of(first, key), key), convert(kind, _of(second, key), key)) for key, kind in key_types(cls)
    ]
    return [(key, as_written(one), as_written(other)) for key, one, other in pairs if one != other]


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return rows in columns."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {one:<{widths[1]}}  {other}".rstrip() for key, one, other in rows)


def _parser() -> command_line.Parser:
    parser = command_line.parser("config", __doc__)
    diff = parser.add_subparsers(required=True, metavar="COMMAND").add_parser("diff", help="list the keys that differ")
    form = "a file, the folder of a run, or preset=NAME"
    diff.add_argument("first", metavar="A", help=form)
    diff.add_argument("second", metavar="B", help=form)
    diff.add_argument("--recipe", choices=RECIPES, help="default: sft, or grpo where a file has a key of it")
    return parser


def _override(text: str) -> str:
    """Return the word of a recipe's command line for an argument."""
    if "=" in text and not Path(text).exists():
        if not text.startswith("preset="):
            raise UserError(f"{text} is not a configuration: give a file, the folder of a run, or preset=NAME")
        return text
    folder = Path(text)
    if folder.is_dir() and not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no {CONFIG}")
    return f"config={folder / CONFIG if folder.is_dir() else folder}"


def _read(words: Sequence[str], recipes: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the first of the recipes that has all keys of the files, and the values of each word."""
    recipe, *others = recipes
    try:
        return recipe, [compose_values(recipe, RECIPES[recipe].config, [word])[0] for word in words]
    except UserError as error:
        if others and "not of this recipe" in str(error):
            return _read(words, others)
        raise


def _of(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


if __name__ == "__main__":
    sys.exit(main())
