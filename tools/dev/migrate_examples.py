"""Compare the outcomes of isoloss-migrate for the example scripts of verl and slime with recorded ones.

    python -m isoloss.tools.dev.migrate_examples --verl DIR --slime DIR
    python -m isoloss.tools.dev.migrate_examples --verl DIR --slime DIR --write

DIR is a checkout of verl-project/verl or of THUDM/slime; the scripts themselves are not ours to keep. The outcomes are
in tests/oracles/migrate/examples.json: the status, the keys that change the result, those whose counterpart must be
given, and of a refusal its line. Exit status: 0 the same, 1 they differ, 2 a mistake.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isoloss.parallel import UserError
from isoloss.tools import command_line
from isoloss.tools.migrate.__main__ import READERS
from isoloss.tools.migrate.result import migrate

GOLDEN = Path("tests/oracles/migrate/examples.json")  # from the root of the repository
SCRIPTS = {"verl": ("examples/**/*.sh",), "slime": ("examples/**/*.sh", "scripts/run-*.sh")}
ANYWHERE = ["HOME=/home/me", "PWD=/home/me/run"]  # the same outcome on every machine
STATUSES = {0: "the same", 1: "unknown keys", 2: "refused", 3: "the result changes"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        now = {name: outcomes(name, getattr(arguments, name)) for name in SCRIPTS}
        if arguments.write:
            GOLDEN.write_text(json.dumps(now, indent=1) + "\n")
        for name, scripts in now.items():
            counts = Counter(outcome["status"] for outcome in scripts.values())
            print(f"{name}: {len(scripts)} scripts; " + ", ".join(f"{STATUSES[n]} {counts[n]}" for n in sorted(counts)))
        differences = list(compare(json.loads(GOLDEN.read_text()), now))
    except (UserError, OSError) as error:
        return command_line.tell_mistake(error)
    print(*differences, sep="\n", end="\n" if differences else "")
    return 1 if differences else 0


def parser() -> argparse.ArgumentParser:
    parser = command_line.parser("dev.migrate_examples", __doc__)
    for name in SCRIPTS:
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR", help=f"a checkout of {name}")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.name} instead of comparing with it")
    return parser


def outcomes(trainer: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome of each script, by its path in the checkout."""
    paths = sorted(path for pattern in SCRIPTS[trainer] for path in folder.glob(pattern))
    if not paths:
        raise UserError(f"--{trainer} {folder}: has no {' or '.join(SCRIPTS[trainer])}")
    return {path.relative_to(folder).as_posix(): outcome(trainer, path) for path in paths}


def outcome(trainer: str, path: Path) -> dict[str, Any]:
    """Return the status, and the keys that change the result and that the user must give."""
    try:
        source, given, unread = READERS[trainer](path, ANYWHERE)
        if not given:
            return {"status": 2, "refused": "no configuration"}
        result = migrate(source, given, unread)
    except UserError as error:
        return {"status": 2, "refused": str(error)}
    changes, give = ([shown.partition("=")[0] for shown, _ in pairs] for pairs in
                     (result.account.changes, result.account.give))  # fmt: skip
    return {"status": result.status, "changes": changes, "give": give}


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each script whose outcome differs."""
    lines = []
    for name in SCRIPTS:
        for script in sorted(before.get(name, {}).keys() | now[name].keys()):
            old, new = before.get(name, {}).get(script), now[name].get(script)
            if old != new:
                lines.append(f"{name}/{script}: was {old}, is {new}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
