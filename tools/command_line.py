"""What the commands of tools/ share."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as recipes do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"isoloss: error: {message}; --help tells more\n")
