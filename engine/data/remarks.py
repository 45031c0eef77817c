"""Count oddities of rows that can be trained on while the rows are read, and report them when a run begins."""

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from isoloss.engine.data.messages import THOUGHTS, check_messages, says_something
from isoloss.engine.data.mixture import Mixture
from isoloss.engine.data.rows import Row

EMPTY_TURN, LOST_THOUGHT, OWN_SYSTEM = "empty_turn", "lost_thought", "own_system"
MESSAGES = {
    EMPTY_TURN: "have an empty turn of the assistant, which is context and not learned: fill it in, or take it out",
    LOST_THOUGHT: "have thoughts (reasoning_content) that are not in what the chat template makes: many templates "
    "leave those of earlier turns out",
    OWN_SYSTEM: "have a system message of their own, and keep it in place of data.system",
}


def remarks(row: Row, form: Sequence[str], tokens_T: Sequence[int], tokenizer) -> list[str]:
    """Return the keys of MESSAGES that apply to a tokenized row. form: the columns that the row is read from."""
    learned = form[-1]
    own = [OWN_SYSTEM] if row.keeps_system else []
    if not isinstance(row.values[learned], list):
        return own
    turns = [
        message
        for message in check_messages(row.values[learned], learned, row.place).messages
        if message["role"] == "assistant"
    ]
    thoughts = [turn[name] for turn in turns for name in THOUGHTS if isinstance(turn.get(name), str)]
    names = own + ([EMPTY_TURN] if not all(map(says_something, turns)) else [])
    if any(thoughts):
        text = _letters(tokenizer.decode(tokens_T, clean_up_tokenization_spaces=False))
        names += [LOST_THOUGHT] if not all(_letters(thought) in text for thought in thoughts) else []
    return names


def _letters(text: str) -> str:
    """Return the text without what templates and tokenizers change: white space, and how characters are composed."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def remark_lines(key: str, forms: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Return lines about the rows of `key`. forms: rows by form. counts: rows by key of MESSAGES."""
    lines = [f"{key}: {counts[name]:,} rows {text}" for name, text in MESSAGES.items() if counts.get(name)]
    if len(forms) > 1:
        rows_by_form = ", ".join(f"{count:,} rows of {form}" for form, count in forms.items())
        lines.insert(0, f"{key}: several forms: {rows_by_form}")
    return lines


def digest(tokens_T: np.ndarray) -> bytes:
    """Return a hash of the tokens of a row."""
    return hashlib.blake2b(np.ascontiguousarray(tokens_T, "<i4").data, digest_size=16).digest()


def repeat_lines(
    train: Iterable[bytes],
    held_out: Iterable[bytes],
    taken: int,
    row: str,
    step: str,
    mixture: Mixture | None = None,
) -> list[str]:
    """Return lines about rows that a run sees more than once an epoch, or both in training and in evaluation.

    train, held_out: digests of the rows of data.train and data.eval.
    taken: rows of a step, batch.global_size.
    row, step: words for a row and a step in the lines.
    mixture: the sources of data.train, if they have weights.
    """
    train, held_out = list(train), list(held_out)
    known, lines = set(train), []
    if mixture is not None:
        lines += mixture.repeat_lines(taken, row, step)
    elif taken > len(train):
        lines.append(
            f"data: a {step} takes every {row} {taken / len(train):.1f} times: batch.global_size={taken:,} is more "
            f"than the {len(train):,} {row}s of data.train"
        )
    if repeated := len(train) - len(known):
        lines.append(f"data: {repeated:,} of {len(train):,} {row}s of data.train repeat an earlier one")
    if both := sum(row_digest in known for row_digest in held_out):
        lines.append(
            f"data: {both:,} of {len(held_out):,} {row}s of data.eval are in data.train as well: evaluations are not "
            "of what the model has not seen"
        )
    return lines
