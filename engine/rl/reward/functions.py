"""Built-in reward functions. A worker loads this file by its path, without the package around it."""

import re

THOUGHT_AND_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S", re.DOTALL)


def exact_match(completion: str, answer: object, finish: str) -> float:
    """1 where the completion is the answer, but for white space around it, and ends by itself."""
    if answer is None:
        raise ValueError("the row has no answer")
    return float(finish == "stop" and completion.strip() == str(answer).strip())


def format(completion: str) -> float:
    """1 where the completion is one thought, <think>...</think>, and an answer after it."""
    return float(THOUGHT_AND_ANSWER.fullmatch(completion.strip()) is not None)
