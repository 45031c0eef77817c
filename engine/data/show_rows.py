"""The first rows as the model gets them: their text, special tokens visible, with the trained tokens marked."""

import itertools
import sys
import textwrap
from collections.abc import Sequence

from isoloss.engine.config.schema import DataConfig
from isoloss.parallel.runtime import environment

ON_A_TERMINAL = 2  # rows, where data.show_rows does not say
MOST = 800  # characters of a run of tokens; of a longer one, its ends
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def rows_to_show(data: DataConfig) -> int:
    """data.show_rows, or what it is by default where standard output goes."""
    if data.show_rows is not None:
        return data.show_rows
    return ON_A_TERMINAL if sys.stdout.isatty() else 0


def coloured() -> bool:
    """Whether targets are marked by colour (https://no-color.org)."""
    return sys.stdout.isatty() and not environment.variable("NO_COLOR")


def shown_row(place: str, tokens_T: Sequence[int], mask_T: Sequence[bool], tokenizer, colour: bool) -> list[str]:
    """Lines for the user. mask_T: which tokens are targets."""
    marks = (GREEN, PLAIN) if colour else ("[[", "]]")
    text = ""
    for target, run in itertools.groupby(zip(mask_T, tokens_T), key=lambda each: each[0]):
        piece = printable(tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False))
        text += piece.join(marks) if target else piece
    targets = sum(mask_T)
    flag = ": no target" if not targets else ": all targets" if targets >= len(mask_T) - 1 else ""
    said = f"row {place}: {len(tokens_T):,} tokens, {targets:,} targets {'in green' if colour else 'in [[ ]]'}{flag}"
    return [said, textwrap.indent(text, "  ")]


def shown_prompt(place: str, tokens_T: Sequence[int], tokenizer) -> list[str]:
    text = printable(tokenizer.decode(list(tokens_T), clean_up_tokenization_spaces=False))
    return [f"prompt {place}: {len(tokens_T):,} tokens", textwrap.indent(text, "  ")]


def printable(text: str) -> str:
    """What a terminal takes for text: control characters of a row, and what standard output cannot write, are written
    as Python does. A long text is cut in its middle."""
    if len(text) > MOST:
        text = f"{text[: MOST // 2]} ... {len(text) - MOST:,} characters ... {text[-MOST // 2 :]}"
    text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
