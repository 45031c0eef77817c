"""The built-in reward functions. A worker loads this file by its path, without the package around it."""

import logging
import re

THOUGHT_AND_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*(?:(?!</?think>).)*\S", re.DOTALL)


def exact_match(completion: str, answer: object, finish: str) -> float:
    """1 where the completion is the answer, but for white space around it, and ends by itself."""
    needs_answer(answer)
    return float(finish == "stop" and completion.strip() == str(answer).strip())


def math(completion: str, answer: object) -> float:
    """1 where math-verify finds the final expression of the completion equal to the answer.

    answer: a number, an expression as LaTeX or plain, or a solution that ends in \\boxed{}, $...$ or #### (GSM8K).
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    needs_answer(answer)
    text = str(answer).rpartition("####")[2].strip()
    if "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"
    # Its own time limits are alarms; the limit of a call is the pool's.
    gold = parse(text, parsing_timeout=0)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {str(answer)[:60]!r}")
    return float(verify(gold, parse(completion, parsing_timeout=0), timeout_seconds=None))


def format(completion: str) -> float:
    """1 where the completion is one thought, <think>...</think>, and an answer after it."""
    return float(THOUGHT_AND_ANSWER.fullmatch(completion.strip()) is not None)


def needs_answer(answer: object) -> None:
    if answer is None:
        raise ValueError("the row has no answer")
