"""What the commands of tools/ share."""

import argparse
import sys
from typing import NoReturn

from isoloss.parallel import UserError


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as recipes do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"isoloss: error: {message}; --help tells more\n")


def parser(tool: str, docstring: str | None) -> Parser:
    """Of `python -m isoloss.tools.TOOL`. docstring: of its module, shown by --help."""
    as_written = argparse.RawDescriptionHelpFormatter
    return Parser(prog=f"python -m isoloss.tools.{tool}", description=docstring, formatter_class=as_written)


def tell_mistake(error: UserError | OSError) -> int:
    """On standard error, in one line. Returns the exit status."""
    told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    print(f"isoloss: error: {told}", file=sys.stderr)
    return 2
