"""Cut the text of a row into pieces of one kind: context, targets, special tokens, unlearned turns, the cut end."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from isoloss.engine.data.show_rows import printable

PLAIN = "\x1b[0m"
LONG = 400  # characters of a piece on a terminal; a longer one is cut in its middle


class Piece(NamedTuple):
    """Text of consecutive tokens.

    trained: whether they are targets.
    muted: whether they are a turn that a weight of 0 takes out of the targets.
    special: whether it is one special token.
    cut: whether they are beyond the limit, and the run does not see them.
    """

    text: str
    trained: bool = False
    muted: bool = False
    special: bool = False
    cut: bool = False

    @property
    def kind(self) -> str:
        return "cut" if self.cut else "trained" if self.trained else "muted" if self.muted else "context"


def pieces(
    tokens_T: np.ndarray,
    mask_T: np.ndarray,
    muted_T: Sequence[bool],
    used: int,
    tokenizer: Any,
    special: frozenset[int],
) -> list[Piece]:
    """Return the pieces of a row. used: number of tokens that the run reads."""
    ids = tokens_T.tolist()

    def kind(i: int) -> tuple:
        return bool(mask_T[i]), muted_T[i], i + 1 if ids[i] in special else 0, i >= used

    runs = [list(run) for _, run in itertools.groupby(range(len(ids)), kind)]
    decode = lambda part: tokenizer.decode(part, clean_up_tokenization_spaces=False)
    texts = [decode([ids[i] for i in run]) for run in runs]
    if "".join(texts) != decode(ids):  # a decoder that takes the space before the first word away
        ends = [len(decode(ids[: run[-1] + 1])) for run in runs]
        whole = decode(ids)
        texts = [whole[start:end] for start, end in zip([0, *ends], ends)]
    return [
        Piece(text, bool(mask_T[run[0]]), bool(muted_T[run[0]]), ids[run[0]] in special, run[0] >= used)
        for text, run in zip(texts, runs)
    ]


def as_text(found: Sequence[Piece], colour: bool, long: int | None = LONG) -> str:
    """Return the pieces for a terminal, in colours or brackets. long: most characters of a piece; None: all."""
    return (
        _coloured(found, lambda text: printable(text, long))
        if colour
        else _bracketed(found, lambda text: printable(text, long))
    )


COLOURS = {"context": "2", "trained": "32", "muted": "33", "cut": "31;9"}
LEGEND = {"context": "context", "trained": "trained", "muted": "turn of weight 0", "cut": "cut off"}
BRACKETS = {"context": ("", ""), "trained": ("[[", "]]"), "muted": ("{{", "}}"), "cut": ("##", "##")}


def legend(colour: bool) -> str:
    """Return the line that explains the marks."""
    if colour:
        return ", ".join(f"\x1b[{COLOURS[kind]}m{words}{PLAIN}" for kind, words in LEGEND.items())
    return ", ".join(words.join(BRACKETS[kind]) for kind, words in LEGEND.items())


def _coloured(found: Sequence[Piece], safe: Callable[[str], str]) -> str:
    return "".join(f"\x1b[{COLOURS[p.kind]}{';1' if p.special else ''}m{safe(p.text)}{PLAIN}" for p in found)


def _bracketed(found: Sequence[Piece], safe: Callable[[str], str]) -> str:
    text = ""
    for kind, run in itertools.groupby(found, lambda piece: piece.kind):
        text += safe("".join(piece.text for piece in run)).join(BRACKETS[kind])
    return text
