"""The built-in reward function `math`, in a file of its own so that the library is imported before any call is timed.

A worker loads this file by its path, without the package around it.
"""

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off


def math(completion: str, answer: object) -> float:
    """1 where math-verify finds the final expression of the completion equal to the answer.

    answer: a number, an expression as LaTeX or plain, or a solution that ends in \\boxed{}, $...$ or #### (GSM8K).
    """
    text = "" if answer is None else str(answer).rpartition("####")[2].strip()
    if "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"
    # Its time limits are alarms; the limit of a call is the pool's.
    gold = parse(text, parsing_timeout=0)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {str(answer)[:60]!r}")
    return float(verify(gold, parse(completion, parsing_timeout=0), timeout_seconds=None))
