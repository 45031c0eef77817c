"""The sft recipe, whose every step takes some seconds longer:

torchrun ... -m cli.slow_steps SECONDS key=value ...
"""

import sys
import time

from isoloss.engine.run.run import BadStepGuard
from isoloss.recipes import launch


def main(seconds: float, argv: list[str]) -> int:
    check = BadStepGuard.check

    def check_slowly(self, step, *rest):
        check(self, step, *rest)
        time.sleep(seconds)

    BadStepGuard.check = check_slowly
    return launch.main("sft", argv)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
