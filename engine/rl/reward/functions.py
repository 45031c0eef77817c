"""Built-in reward functions. A worker loads this file by its path, without the package around it."""

import re
from decimal import Decimal
from numbers import Number

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
THOUGHT_AND_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S", re.DOTALL)


def exact_match(completion_final: str, answer: object, finish: str) -> float:
    """1 where the completion's answer is that of the row, but for white space around it, and the completion ends by
    itself. An answer that is a number is compared by value with a number in decimal digits."""
    if answer is None or answer == "":  # which an unfinished thought would match
        raise ValueError("the row has no answer")
    said = completion_final.rpartition("</think>")[2].strip()  # a user's function may give it a whole completion
    if isinstance(answer, str | bool):
        right = said == str(answer).strip()
    elif isinstance(answer, Number) and NUMBER.fullmatch(str(answer)):
        right = NUMBER.fullmatch(said) is not None and Decimal(said) == Decimal(str(answer))
    else:
        raise ValueError(
            f"the answer is {type(answer).__name__} {str(answer)[:60]}: give it as text or a finite number"
        )
    return float(finish == "stop" and right)


def format(completion_marked: str) -> float:
    """1 where the completion is one thought, <think>...</think>, and an answer after it."""
    return float(THOUGHT_AND_ANSWER.fullmatch(completion_marked.strip()) is not None)
