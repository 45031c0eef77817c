"""Name this program in its help, and print its version with those of what it runs on. Imports no torch."""

import argparse
import platform
import sys
from typing import Any

from isoloss.parallel.runtime.versions import VERSION, version_of

COMMAND = "isoloss"


def name_of(module: str) -> str:
    """Return how a user started this program: "isoloss sft", or else "python -m MODULE"."""
    return sys.argv[0] if sys.argv[0].startswith(f"{COMMAND} ") else f"python -m {module}"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the option --version."""
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print versions and stop")


def version_line() -> str:
    """Return the version of isoloss, and those of Python and of the two packages that decide its numbers."""
    packages = (f"{name} {version_of(name) or '(not installed)'}" for name in ("torch", "megatron-core"))
    return f"{COMMAND} {VERSION}, {', '.join(packages)}, Python {platform.python_version()}"


class _ShowVersion(argparse.Action):
    """Prints the version when it is asked for: to read the metadata of packages takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> None:
        print(version_line())
        parser.exit()
