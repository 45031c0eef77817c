"""Completions -> rewards: a weighted sum of functions that run in processes of their own (docs/rewards.md).

A function that fails on a completion, by an exception, a result that is not a finite number, a time-out or a crash,
costs that completion its reward, which is then math.nan, and the run nothing: failures are masked and counted, and
never taken for 0. The built-in `math` alone gives 0 where it runs out of time.
"""

import difflib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss.engine.rl.config import RewardConfig
from isoloss.engine.rl.reward import answer
from isoloss.engine.rl.reward.in_process import Calls, Reward
from isoloss.engine.rl.reward.pool import OutOfTime
from isoloss.engine.rl.reward.signatures import Attempt, Parameter, RewardFunction, recognise
from isoloss.engine.rl.trajectory import Completion, Prompt, Trajectory
from isoloss.parallel.runtime.errors import UserError

BUILT_IN = {"exact_match": "functions.py", "math": "math_answers.py", "format": "functions.py"}


@dataclass(frozen=True)
class Scored:
    """The score of a completion.

    reward: the weighted sum, or math.nan where a function failed.
    parts: result of each function, unweighted, by its label; math.nan where it failed, absent where it returned None
        (does not apply).
    error: the first failure, None without.
    text: text of the completion, without special tokens.
    timed_out: whether its verification by `math` ran out of time, which gives 0.
    """

    reward: float
    parts: dict[str, float]
    error: str | None
    text: str
    timed_out: bool = False


class Rewarder:
    """The functions of reward.function, ready in their worker processes. One rank has it; no collectives.

    prompts: all that it will be asked about: they decide which columns a function can be given.
    hidden: a variable of the environment that the functions are not to know, such as the key of servers.
    given: functions that are called in this process, without a time limit, by their names in reward.function.
    Raises UserError where a function cannot be imported, or asks for what nothing provides.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer,
        prompts: Sequence[Prompt],
        hidden: str | None = None,
        given: Mapping[str, Reward] = {},
    ):
        self._names, self._tokenizer = config.function, tokenizer
        weights = config.weights or (1.0,) * len(config.function)
        functions = [given.get(name) or located(name) for name in config.function]
        self._pool = Calls(functions, config.workers, config.timeout, hidden)
        try:
            self._functions = [
                described(index, name, label, weight, self._pool.described[index], prompts)
                for index, (name, label, weight) in enumerate(zip(self._names, labels(self._names), weights))
            ]
        except UserError:
            self.close()
            raise

    def __enter__(self) -> "Rewarder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; twice does no harm."""
        self._pool.close()

    @property
    def whole_batch(self) -> bool:
        """Return whether a function wants all completions of a batch in one call."""
        return any(function.batched for function in self._functions)

    def lacking(self, prompt: Prompt) -> list[str]:
        """Return the columns that functions ask for without a default, and that this row lacks: they get None."""
        names = dict.fromkeys(name for function in self._functions for name in function.lacking(prompt))
        return [*names]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Scored]:
        """The reward of each completion, completions[i] being one of prompts[i]; a batched function sees all at once.

        UserError where a batched function gives another number of rewards than it got completions.
        """
        attempts = [
            Attempt(prompt, completion, answer.read(prompt, completion, self._tokenizer))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if not attempts:
            return []
        calls = [function.calls(attempts) for function in self._functions]
        results = iter(self._pool.run([call for each in calls for call in each]))
        outcomes = []
        for function, each in zip(self._functions, calls):
            answers = [next(results) for _ in each]
            outcomes.append(
                spread(self._names[function.index], answers[0], len(attempts)) if function.batched else answers
            )
        return [
            total(self._functions, of_one, attempt.texts.plain) for of_one, attempt in zip(zip(*outcomes), attempts)
        ]


def check_rewarded(trajectories: Sequence[Trajectory], rewarded_by: str) -> None:
    """UserError where not one of them could be rewarded. To be asked about whole batches: the completions of a single
    prompt may all fail for what stands in its row."""
    if trajectories and all(trajectory.error is not None for trajectory in trajectories):
        first = trajectories[0]
        raise UserError(
            f"{rewarded_by}: none of {len(trajectories)} completions could be "
            f"rewarded; the first, {first.id}: {first.error}: fix the function"
        )


def located(name: str) -> str:
    """FILE.py:NAME or MODULE:NAME of a function of reward.function."""
    if name in BUILT_IN:
        return f"{Path(__file__).with_name(BUILT_IN[name])}:{name}"
    target, _, function = name.rpartition(":")
    if not target or not function:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(
            f"reward.function={name} is neither built in ({', '.join(BUILT_IN)}) nor of the form file.py:function or "
            f"package.module:function: {hint or 'correct it'}".rstrip()
        )
    return name


def labels(names: Sequence[str]) -> list[str]:
    """Return the part of each name after the colon; the whole name where that would be ambiguous."""
    short = [name.rpartition(":")[2] for name in names]
    count = Counter(short)
    return [each if count[each] == 1 else name for each, name in zip(short, names)]


def described(
    index: int, name: str, label: str, weight: float, answer: Any, prompts: Sequence[Prompt]
) -> RewardFunction:
    if isinstance(answer, str):
        raise UserError(f"reward.function={name} {answer}")
    parameters = tuple(Parameter(*each) for each in answer)
    return RewardFunction(index, name, label, weight, recognise(name, parameters, prompts), parameters)


def spread(name: str, result: Any, count: int) -> list[Any]:
    """The result of one call for all completions -> one outcome each."""
    if isinstance(result, str):
        return [result] * count
    if len(result) != count:
        raise UserError(
            f"reward.function={name} returned {len(result)} rewards for {count} completions: return one for each, in "
            "their order"
        )
    return result


def total(functions: Sequence[RewardFunction], outcomes: Sequence[float | str | None], text: str) -> Scored:
    """Return the score of one completion. outcomes: a number, None (does not apply) or a fault, for each function."""
    # A policy that finds what stops its verification must lose by it. Of a user's function time may say something else.
    stopped = [isinstance(each, OutOfTime) and function.name == "math" for function, each in zip(functions, outcomes)]
    outcomes = [0.0 if out else outcome for out, outcome in zip(stopped, outcomes)]
    parts = {
        function.label: math.nan if isinstance(outcome, str) else outcome
        for function, outcome in zip(functions, outcomes)
        if outcome is not None
    }
    failed = [(function, outcome) for function, outcome in zip(functions, outcomes) if isinstance(outcome, str)]
    error = f"{failed[0][0].label}: {failed[0][1]}" if failed else None
    if not parts:
        error = "no reward function applies to it: all returned None"
    weighted = sum(function.weight * parts[function.label] for function in functions if function.label in parts)
    return Scored(math.nan if error else float(weighted), parts, error, text, any(stopped))
