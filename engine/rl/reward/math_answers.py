"""The built-in reward function `math`, in a file of its own so that the library is imported before any call is timed.

A worker loads this file by its path, without the package around it.
"""

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off


def last_box(text: str) -> str | None:
    """The last \\boxed{...} alone: math-verify reads several boxes as one set. "" where it is not closed; None
    without."""
    _, found, inside = text.rpartition("\\boxed{")
    if not found:
        return None
    depth = 1
    for end, letter in enumerate(inside):
        escaped = end > 0 and inside[end - 1] == "\\"
        depth += 0 if escaped else (letter == "{") - (letter == "}")
        if depth == 0:
            return found + inside[: end + 1]
    return ""


def math(completion_final: str, answer: object) -> float:
    """1 where math-verify finds the last box of the completion's answer, else its final expression, equal to the row's.

    answer: a number, an expression as LaTeX or plain, or a solution that ends in \\boxed{}, $...$ or #### (GSM8K).
    """
    text = "" if answer is None else str(answer).rpartition("####")[2].strip()
    if "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"
    # Its time limits are alarms; the limit of a call is the pool's.
    gold = parse(text, parsing_timeout=0)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {str(answer)[:60]!r}")
    box = last_box(completion_final)
    said = completion_final if box is None else box
    return float(verify(gold, parse(said, parsing_timeout=0), timeout_seconds=None))
