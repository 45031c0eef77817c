"""The one exception that means "the user can fix this"."""


class UserError(ValueError):
    """A mistake in the configuration or the data.

    The message is one line that names the key or row, its value and the fix. Entry points print it once (not once a
    rank), without a traceback, and exit with status 2; any other exception is a crash and keeps its traceback.
    """
