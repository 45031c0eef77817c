"""Start the front: python -m isoloss.tools.serve.front SOCKET key=value ..."""

import asyncio
import sys
from collections.abc import Sequence

from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes import launch
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.front.app import serve


def main(argv: Sequence[str] | None = None) -> int:
    address, *words = sys.argv[1:] if argv is None else argv
    try:
        config, *_ = launch.compose_config("serve", ServeConfig, words)
        asyncio.run(serve(config, address))
    except UserError as mistake:
        launch.print_error_once(str(mistake))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
