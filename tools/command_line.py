"""Parse arguments and report mistakes, the same way in all commands of tools/."""

import argparse
import sys
from typing import NoReturn

from isoloss.parallel import UserError
from isoloss.parallel.runtime import program


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, as recipes do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"isoloss: error: {message}; --help tells more\n")


def parser(tool: str, docstring: str | None) -> Parser:
    """Return the parser of `python -m isoloss.tools.TOOL`. docstring: the text of --help."""
    as_written = argparse.RawDescriptionHelpFormatter
    made = Parser(prog=program.name_of(f"isoloss.tools.{tool}"), description=docstring, formatter_class=as_written)
    program.add_version(made)
    return made


def tell_mistake(error: UserError | OSError) -> int:
    """Report a mistake on standard error, in one line. Return the exit status."""
    message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    print(f"isoloss: error: {message}", file=sys.stderr)
    return 2
