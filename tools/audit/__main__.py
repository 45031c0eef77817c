"""Audit the data of a run before a GPU is rented: what the loss will see of it.

    python -m isoloss.tools.audit sft model.path=DIR data.train=FILE data.max_length=2048
    python -m isoloss.tools.audit grpo model.path=DIR data.train=FILE reward.function=math
    python -m isoloss.tools.audit sft model.path=DIR data.train=FILE --html audit.html
    python -m isoloss.tools.audit sft model.path=DIR data.train=FILE --fail-on rejected,duplicates>0.01

Takes the words of the recipe and reads its rows as the run does. model.path needs config.json and a tokenizer, no
weights. Prints rows, tokens and targets; which rows are cut, dropped or rejected, and why; rows that repeat others; in
reinforcement learning rows whose own answer gets no reward; and some rows with their trained tokens marked.
Exit status: 0 done, 1 a finding of --fail-on holds, 2 a mistake in the arguments, the configuration or the files.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from isoloss.engine.config.parse import known_keys
from isoloss.engine.data.show_rows import coloured
from isoloss.parallel import UserError
from isoloss.recipes.command_line import refuse_repeated, refuse_spaces
from isoloss.recipes.launch import RECIPES, compose_config, print_error_once
from isoloss.tools import command_line

ROWS = 3  # shown on a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    arguments = _parser().parse_intermixed_args(argv)  # keys may stand on both sides of an option
    try:
        return run(arguments)
    except (UserError, OSError) as error:
        print_error_once(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Audit, print and write what was asked for. Return the exit status. Raises UserError."""
    recipe, overrides = split_words(arguments.words)
    config_class = RECIPES[recipe].config
    refuse_repeated(config_class, overrides)
    refuse_spaces(known_keys(config_class), overrides)
    for option in ("html", "json"):
        file = getattr(arguments, option)
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"--{option}={file} must be a file in a folder that exists")
    if arguments.rows < 0:
        raise UserError(f"--rows {arguments.rows} must be at least 0")
    config, _, preset = compose_config(recipe, config_class, overrides)
    print(f"{recipe} preset={preset}: the data of {config.model.path} as its run will see it", flush=True)
    # Their import takes seconds: help, a mistake and the first line do not wait for it.
    from isoloss.tools.audit import findings, page, report, shown
    from isoloss.tools.audit.audit import audit

    names = findings.names_of(recipe != "sft", bool(config.data.eval))
    conditions = findings.conditions_of(arguments.fail_on, names) if arguments.fail_on else []
    found = audit(config, f"{recipe}-{preset}")
    asked = shown.rows_at(found, arguments.row)
    rows = asked or shown.shown_rows(found, 0, shown.worst(found.splits[0], found.remarks[0], arguments.rows))
    print(*report.lines_of(found, shutil.get_terminal_size().columns), sep="\n")
    print(*report.rows_lines(rows, coloured(), whole=bool(asked)), sep="\n")
    failures = findings.failed(conditions, found.findings)
    if arguments.json is not None:
        content = {"recipe": recipe, "preset": preset, **report.record(found), "failed": failures}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.html is not None:
        arguments.html.write_text(page.page(found, f"{recipe} preset={preset}"), encoding="utf-8")
        print(f"\npage: {arguments.html}")
    if failures:
        print("", *(f"--fail-on {failure}" for failure in failures), sep="\n")
    return int(bool(failures))


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the recipe, sft if none is named, and the overrides. Raises UserError."""
    if not words or "=" in words[0]:
        return "sft", [*words]
    if words[0] not in RECIPES:
        raise UserError(f"there is no recipe {words[0]!r}; recipes are {', '.join(RECIPES)}, and keys are key=value")
    return words[0], [*words[1:]]


def _parser() -> command_line.Parser:
    parser = command_line.parser("audit", __doc__)
    parser.add_argument("words", nargs="*", metavar="[recipe] key=value", help="words of the recipe; default: sft")
    parser.add_argument("--rows", type=int, default=ROWS, metavar="N", help="rows shown; default: %(default)s")
    parser.add_argument(
        "--row", action="append", default=[], metavar="FILE:LINE", help="show this row, whole; may stand repeatedly"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the figures and hundreds of rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--fail-on", metavar="LIST", help="findings that give status 1: NAME, NAME>COUNT or NAME>SHARE, by commas"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
