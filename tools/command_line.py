"""What the commands of tools/ share."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as recipes do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"isoloss: error: {message}; --help tells more\n")


def parser(tool: str, docstring: str | None) -> Parser:
    """Of `python -m isoloss.tools.TOOL`. docstring: of its module, shown by --help."""
    as_written = argparse.RawDescriptionHelpFormatter
    return Parser(prog=f"python -m isoloss.tools.{tool}", description=docstring, formatter_class=as_written)
