"""Score the answers of rows by the reward functions of a run, each as if a completion were the answer itself.

A row whose own answer gets no reward teaches nothing: no completion is right. The answer is tried as it stands, in
\\boxed{}, and as what follows #### (GSM8K), each alone, behind an empty thought, and behind the end of a thought that
the prompt opens.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.rewarder import BUILT_IN, Rewarder
from isoloss.engine.rl.trajectory import Completion, Prompt
from isoloss.parallel.runtime.console import Progress

SCORED = 10_000  # rows of a split, evenly chosen of more: a verifier may take milliseconds an answer
BATCH = 256  # completions of a call
THOUGHTS = ("", "<think>\n\n</think>\n\n", "\n</think>\n\n")


@dataclass(frozen=True)
class Answers:
    """The rewards of the rows' own answers.

    scored: number of rows that were looked at.
    without: number of rows among these that have no answer, which were not tried.
    unscorable: reason why a row's own answer gets no reward, by row.
    raising: number of rows among these for which every attempt failed.
    lacking: number of rows without a column that a function asks for, by column.
    """

    scored: int
    without: int
    unscorable: Mapping[int, str] = field(default_factory=dict)
    raising: int = 0
    lacking: Mapping[str, int] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """Return the counts as plain values, for JSON."""
        return {
            "scored": self.scored, "without": self.without, "unscorable": len(self.unscorable),
            "raising": self.raising, "lacking": dict(self.lacking),
        }  # fmt: skip


def score_answers(
    config: RLConfig, prompts: Sequence[Prompt], rewarder: Rewarder, tokenizer: Any, stop: int, what: str
) -> Answers:
    """Return what the functions of `rewarder` make of the answers.

    stop: token that ends a completion.
    what: name of the split, for progress.
    """
    chosen = np.linspace(0, len(prompts) - 1, min(SCORED, len(prompts))).astype(int).tolist()
    lacking = Counter(column for row in chosen for column in rewarder.lacking(prompts[row]))
    tried = [row for row in chosen if prompts[row].answer not in (None, "")]
    progress = Progress("scoring", f"answers of {what}", lambda: len(tried))
    unscorable, raising = {}, 0
    for start in range(0, len(tried), BATCH):
        rows = tried[start : start + BATCH]
        batch = Batch([prompts[row] for row in rows], rewarder, tokenizer, stop)
        reasons = batch.unscorable(full_reward(config))
        unscorable |= {rows[index]: reason for index, reason in reasons.items()}
        raising += sum(batch.best[index] == -math.inf for index in reasons)
        progress.advance(len(rows))
    return Answers(len(chosen), len(chosen) - len(tried), unscorable, raising, dict(lacking))


def full_reward(config: RLConfig) -> float | None:
    """Return the reward of a right completion; None if a function of the user's decides what that is."""
    if not all(name in BUILT_IN for name in config.reward.function):
        return None
    weights = config.reward.weights or (1.0,) * len(config.reward.function)
    return sum(weight for weight in weights if weight > 0)


class Batch:
    """Rows whose answers are tried together. best: the highest reward of each so far; -math.inf if all failed."""

    def __init__(self, prompts: Sequence[Prompt], rewarder: Rewarder, tokenizer: Any, stop: int):
        self._prompts, self._rewarder, self._tokenizer, self._stop = prompts, rewarder, tokenizer, stop
        self.best = [-math.inf] * len(prompts)
        self._errors: dict[int, str] = {}

    def unscorable(self, full: float | None) -> dict[int, str]:
        """Return why a row's own answer gets no reward, by index. full: see `full_reward`."""
        rows = list(range(len(self._prompts)))
        # A user's function has a scale of its own: its reward has to be above that of an empty completion.
        if full is None:
            enough = [math.nextafter(reward, math.inf) for _, reward, _ in self._score(rows, [""] * len(rows))]
        else:
            enough = [full - 1e-9] * len(rows)
        attempts = [completions_of(prompt.answer) for prompt in self._prompts]
        for attempt in range(max(map(len, attempts))):
            rows = [row for row in rows if self.best[row] < enough[row] and attempt < len(attempts[row])]
            for row, reward, error in self._score(rows, [attempts[row][attempt] for row in rows]):
                self.best[row] = max(self.best[row], reward)
                if error is not None:
                    self._errors.setdefault(row, error)
        return {row: self._reason(row, full) for row, best in enumerate(self.best) if best < enough[row]}

    def _score(self, rows: Sequence[int], texts: Sequence[str]) -> list[tuple[int, float, str | None]]:
        """Return (row, reward, error) of completions with these texts. The reward of an error is -math.inf."""
        completions = [completion(text, self._tokenizer, self._stop) for text in texts]
        scores = self._rewarder.score([self._prompts[row] for row in rows], completions)
        return [(row, -math.inf if s.error else s.reward, s.error) for row, s in zip(rows, scores)]

    def _reason(self, row: int, full: float | None) -> str:
        if self.best[row] == -math.inf:
            return self._errors[row]
        rule = "no more than an empty completion" if full is None else f"not the full {full:g}"
        return f"its own answer gets {self.best[row]:g}, {rule}"


def completions_of(answer: Any) -> list[str]:
    """Return the texts of completions that give an answer, the plainest first."""
    text = str(answer)
    bodies = dict.fromkeys((text, f"\\boxed{{{text}}}", text.rpartition("####")[2].strip()))
    return [thought + body for thought in THOUGHTS for body in bodies]


def completion(text: str, tokenizer: Any, stop: int) -> Completion:
    """Return a completion as a backend gives it, which ends by itself."""
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], stop]
    return Completion("audit", tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")
