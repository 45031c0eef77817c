"""Show the first rows as the model gets them: their text with special tokens, the trained tokens marked."""

import itertools
import sys
import textwrap
from collections.abc import Sequence

from isoloss.engine.config.schema import DataConfig
from isoloss.parallel.runtime import environment

ON_A_TERMINAL = 2  # rows shown on a terminal if data.show_rows is null
MOST = 800  # characters shown of a run of tokens; a longer run is cut in its middle
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def rows_to_show(data: DataConfig) -> int:
    """Return data.show_rows, or its default, which depends on whether standard output is a terminal."""
    if data.show_rows is not None:
        return data.show_rows
    return ON_A_TERMINAL if sys.stdout.isatty() else 0


def coloured() -> bool:
    """Return whether targets are marked by colour (https://no-color.org)."""
    return sys.stdout.isatty() and not environment.variable("NO_COLOR")


def shown_row(place: str, tokens_T: Sequence[int], mask_T: Sequence[bool], tokenizer, colour: bool) -> list[str]:
    """Return lines for the user. mask_T: True at targets."""
    marks = (GREEN, PLAIN) if colour else ("[[", "]]")
    text = ""
    for target, run in itertools.groupby(zip(mask_T, tokens_T), key=lambda token: token[0]):
        piece = printable(tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False))
        text += piece.join(marks) if target else piece
    targets = sum(mask_T)
    flag = ": no target" if not targets else ": all targets" if targets >= len(mask_T) - 1 else ""
    head = f"row {place}: {len(tokens_T):,} tokens, {targets:,} targets {'in green' if colour else 'in [[ ]]'}{flag}"
    return [head, textwrap.indent(text, "  ")]


def shown_prompt(place: str, tokens_T: Sequence[int], tokenizer) -> list[str]:
    """Return lines for the user about a prompt of reinforcement learning."""
    text = printable(tokenizer.decode(list(tokens_T), clean_up_tokenization_spaces=False))
    return [f"prompt {place}: {len(tokens_T):,} tokens", textwrap.indent(text, "  ")]


def printable(text: str, most: int | None = MOST) -> str:
    """Return a text that is safe to print: escaped where it has control characters, or characters that the encoding of
    standard output lacks, and cut in its middle if it is long.

    most: number of characters above which it is cut; None: it is not.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]} ... {len(text) - most:,} characters ... {text[-most // 2 :]}"
    text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
