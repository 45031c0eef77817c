"""Run the command `isoloss`: python -m isoloss SUBCOMMAND, also under torchrun."""

import sys

from isoloss.tools.command.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
