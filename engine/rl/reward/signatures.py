"""Call reward functions. The names of the parameters distinguish three conventions:

isoloss   f(prompt, completion, answer, **extra) -> number                  any of NAMES and the row's columns
verl      f(data_source, solution_str, ground_truth, extra_info=None)       number, or a mapping with "score"
TRL       f(prompts, completions, **columns) -> numbers and None            one call for the whole batch
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from isoloss.engine.rl.reward.answer import Texts
from isoloss.engine.rl.reward.pool import Call
from isoloss.engine.rl.trajectory import Completion, Prompt
from isoloss.parallel.runtime.errors import UserError

Convention = Literal["isoloss", "verl", "trl"]
TEXTS = ("completion_raw", "completion_marked", "completion_final")
NAMES = ("prompt", "completion", "answer", "source", "finish", "id", "completion_tokens", *TEXTS)
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_TEXTS = ("completions_raw", "completions_marked", "completions_final")
TRL_NAMES = ("prompts", "completions", "completion_ids", *TRL_TEXTS)


class Attempt(NamedTuple):
    """A completion that wants a reward, and its texts."""

    prompt: Prompt
    completion: Completion
    texts: Texts


class Parameter(NamedTuple):
    """kind: kind of inspect.Parameter."""

    name: str
    kind: str
    required: bool


@dataclass(frozen=True)
class RewardFunction:
    """index: its number among the functions of the workers. name: in reward.function. label: what metrics call it."""

    index: int
    name: str
    label: str
    weight: float
    convention: Convention
    parameters: tuple[Parameter, ...]

    @property
    def batched(self) -> bool:
        return self.convention == "trl"

    def calls(self, attempts: Sequence[Attempt]) -> list[Call]:
        """Return a call for each attempt, or one for all."""
        if self.batched:
            return [Call(self.index, self._arguments(trl_values(attempts)), batched=True)]
        values = verl_values if self.convention == "verl" else own_values
        return [Call(self.index, self._arguments(values(attempt))) for attempt in attempts]

    def lacking(self, prompt: Prompt) -> list[str]:
        """Return the parameters without a default for which the row has no column."""
        answers = ("ground_truth",) if self.convention == "verl" else ("answer",)
        provided = {*NAMES, *VERL_NAMES, *TRL_NAMES, "trainer_state", *prompt.extra}.difference(answers)
        wanted = [each.name for each in self.parameters if each.required and not each.kind.startswith("VAR")]
        return [name for name in wanted if name not in provided and (name not in answers or prompt.answer is None)]

    def _arguments(self, values: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the arguments by name. values: those that a parameter can name, and the rest for a ** parameter."""
        named, rest = values
        arguments: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.kind == "VAR_KEYWORD":
                arguments = {**rest, **arguments}
            elif parameter.kind != "VAR_POSITIONAL" and (parameter.required or parameter.name in named):
                arguments[parameter.name] = named.get(parameter.name)  # None where this row lacks the column
        return arguments


def recognise(function: str, parameters: Sequence[Parameter], prompts: Sequence[Prompt]) -> Convention:
    """The convention of a function. UserError where it asks for something that none of the prompts provides."""
    names = {parameter.name for parameter in parameters}
    columns = {name for prompt in prompts for name in prompt.extra}
    answers: tuple[str, ...]
    if names & set(TRL_NAMES):
        convention, answers = "trl", ("answer",)
        provided = {*TRL_NAMES, "trainer_state", "data_source", "answer", *columns}
    elif "solution_str" in names:
        convention, answers, provided = "verl", ("ground_truth",), {*VERL_NAMES, *TEXTS}
    else:
        convention, answers = "isoloss", ("answer",)
        provided = {*NAMES, *columns}
    if all(prompt.answer is None for prompt in prompts):
        provided.difference_update(answers)
    for parameter in parameters:
        if parameter.kind == "POSITIONAL_ONLY":
            raise UserError(f"reward.function={function}: its parameter {parameter.name!r} has no name to callers: "
                            "take the / out of its signature")  # fmt: skip
        if parameter.required and not parameter.kind.startswith("VAR") and parameter.name not in provided:
            raise UserError(
                f"reward.function={function}: nothing provides its parameter {parameter.name!r}: there are "
                f"{', '.join(sorted(provided))}; rename it, add that column to the rows, or give it a default"
            )
    return convention


def own_values(attempt: Attempt) -> tuple[dict[str, Any], dict[str, Any]]:
    prompt, completion = attempt.prompt, attempt.completion
    extra = {name: value for name, value in prompt.extra.items() if name not in NAMES}
    named = {
        "prompt": as_stored(prompt),
        "completion": attempt.texts.plain,
        "answer": prompt.answer,
        "source": prompt.source,
        "finish": completion.finish,
        "id": completion.id,
        "completion_tokens": list(completion.tokens),
        **texts(attempt, TEXTS),
    }
    return {**extra, **named}, extra


def verl_values(attempt: Attempt) -> tuple[dict[str, Any], dict[str, Any]]:
    prompt = attempt.prompt
    named = {
        "data_source": prompt.source,
        "solution_str": attempt.texts.plain,
        "ground_truth": prompt.answer,
        "extra_info": prompt.extra.get("extra_info", {}),
        **texts(attempt, TEXTS),
    }
    return named, {}


def trl_values(attempts: Sequence[Attempt]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lists, as long as the batch; rows of messages have their completions as messages too."""
    prompts = [attempt.prompt for attempt in attempts]
    columns = sorted({name for prompt in prompts for name in prompt.extra})
    named: dict[str, Any] = {name: [prompt.extra.get(name) for prompt in prompts] for name in columns}
    named |= {
        "answer": [prompt.answer for prompt in prompts],
        "data_source": [prompt.source for prompt in prompts],
        "prompts": [as_stored(prompt) for prompt in prompts],
        "completions": [
            each.texts.plain
            if isinstance(each.prompt.prompt, str)
            else [{"role": "assistant", "content": each.texts.plain}]
            for each in attempts
        ],
        "completion_ids": [list(attempt.completion.tokens) for attempt in attempts],
    }
    found = [texts(attempt, TRL_TEXTS) for attempt in attempts]
    named |= {name: [each[name] for each in found] for name in TRL_TEXTS}
    return {**named, "trainer_state": None}, named


def texts(attempt: Attempt, names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, (attempt.texts.raw, attempt.texts.marked, attempt.texts.final), strict=True))


def as_stored(prompt: Prompt) -> str | list[Mapping[str, Any]]:
    return prompt.prompt if isinstance(prompt.prompt, str) else list(prompt.prompt)
