"""The sft recipe for torchrun, whose rank 1 is killed after a step, in torchrun's first attempt only:

torchrun ... -m cli.first_attempt STEP key=value ...
"""

import os
import signal
import sys

from isoloss.engine.run.run import BadStepGuard
from isoloss.recipes import launch


def main(step_of_death: int, argv: list[str]) -> int:
    check = BadStepGuard.check

    def check_or_die(self, step, *rest):
        check(self, step, *rest)
        if step == step_of_death and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    BadStepGuard.check = check_or_die
    return launch.main("sft", argv)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
