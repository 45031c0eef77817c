"""Run a module as a shell runs it, in a session whose terminal is standard input:

python -m support.runs.at_terminal MODULE [WORD ...]
"""

import fcntl
import runpy
import sys
import termios

if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
