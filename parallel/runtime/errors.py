"""Exceptions that end a run without a crash: the user can fix something, or has asked for the end."""

import signal


class UserError(ValueError):
    """A mistake in the configuration or the data.

    The message is one line that names the key or row, its value and the fix. Entry points print it once (not once a
    rank), without a traceback, and exit with status 2; any other exception is a crash and keeps its traceback.
    """


class PreemptedError(Exception):
    """The end of a run that received a signal and has saved. Entry points exit with the status PREEMPTED."""

    def __init__(self, told: signal.Signals):
        super().__init__(told)
        self.told = told

    def __str__(self) -> str:
        return f"{self.told.name} ended the run after a checkpoint: go on with checkpoint.resume=true"


# EX_TEMPFAIL of sysexits.h, which asks for another try later.
PREEMPTED = 75
