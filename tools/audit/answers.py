"""Score the answers of rows by the reward functions of a run, each as if a completion were the answer itself.

A row whose own answer gets no reward teaches nothing: no completion is right. The answer is tried as it stands, in
\\boxed{}, and as what follows #### (GSM8K), each alone, behind an empty thought, and behind the end of a thought that
the prompt opens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isoloss.engine.instruments.console import Progress
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.rewarder import BUILT_IN, Rewarder
from isoloss.engine.rl.trajectory import Completion, Prompt

SCORED = 10_000  # rows of a split, evenly chosen of more: a verifier may take milliseconds an answer
BATCH = 256  # completions of a call
THOUGHTS = ("", "<think>\n\n</think>\n\n", "\n</think>\n\n")


@dataclass(frozen=True)
class Answers:
    """What reward functions make of the rows' own answers.

    scored: number of rows that were scored.
    without: number of rows among these without an answer, which were not tried.
    unscorable: reason why its own answer gets no reward, by row.
    raising: the first failure, by row, of those rows in which every attempt failed; among `unscorable` too.
    lacking: number of rows that lack a column that a function asks for, by column.
    """

    scored: int
    without: int
    unscorable: dict[int, str] = field(default_factory=dict)
    raising: dict[int, str] = field(default_factory=dict)
    lacking: dict[str, int] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """Return the counts as plain values, for JSON."""
        counts = {"scored": self.scored, "without": self.without, "lacking": self.lacking}
        return counts | {"unscorable": len(self.unscorable), "raising": len(self.raising)}


def score_answers(
    config: RLConfig, prompts: Sequence[Prompt], rewarder: Rewarder, tokenizer: Any, stop: int, what: str
) -> Answers:
    """Return what the functions of `rewarder` make of the answers. stop: token that ends a completion."""
    chosen = range(len(prompts))
    if len(prompts) > SCORED:
        chosen = np.linspace(0, len(prompts) - 1, SCORED).astype(int).tolist()
    lacking: dict[str, int] = {}
    for row in chosen:
        for column in rewarder.lacking(prompts[row]):
            lacking[column] = lacking.get(column, 0) + 1
    tried = [row for row in chosen if prompts[row].answer not in (None, "")]
    best, errors = dict.fromkeys(tried, -math.inf), {}
    full = full_reward(config)
    progress = Progress("scoring", f"answers of {what}", lambda: len(tried))

    def score(rows: Sequence[int], texts: Sequence[str]) -> list[float]:
        rewards = []
        for start in range(0, len(rows), BATCH):
            part = slice(start, start + BATCH)
            completions = [completion(text, tokenizer, stop) for text in texts[part]]
            for row, scored in zip(rows[part], rewarder.score([prompts[row] for row in rows[part]], completions)):
                rewards.append(-math.inf if scored.error else scored.reward)
                if scored.error:
                    errors.setdefault(row, scored.error)
        return rewards

    # A user's function has a scale of its own: its reward has to be above that of an empty completion.
    wanted = dict.fromkeys(tried, full) if full is not None else dict(zip(tried, score(tried, [""] * len(tried))))
    errors.clear()
    left, attempt = tried, 0
    while left:
        texts = {row: forms for row in left if (forms := completions_of(prompts[row].answer)[attempt : attempt + 1])}
        for row, reward in zip(texts, score(list(texts), [forms[0] for forms in texts.values()])):
            best[row] = max(best[row], reward)
        enough = {row for row in texts if (best[row] >= full - 1e-9 if full is not None else best[row] > wanted[row])}
        progress.advance(len(left) - len(texts) + len(enough))
        left, attempt = [row for row in texts if row not in enough], attempt + 1
    reached = lambda row: best[row] >= full - 1e-9 if full is not None else best[row] > wanted[row]
    raising = {row: errors[row] for row in tried if best[row] == -math.inf}
    unscorable = {row: raising.get(row) or too_little(best[row], full) for row in tried if not reached(row)}
    return Answers(len(chosen), len(chosen) - len(tried), unscorable, raising, lacking)


def full_reward(config: RLConfig) -> float | None:
    """Return the reward of a right completion; None if a function of the user's decides what that is."""
    if not all(name in BUILT_IN for name in config.reward.function):
        return None
    weights = config.reward.weights or (1.0,) * len(config.reward.function)
    return sum(weight for weight in weights if weight > 0)


def too_little(best: float, full: float | None) -> str:
    rule = "no more than an empty completion" if full is None else f"not the full {full:g}"
    return f"its own answer gets {best:g}, {rule}"


def completions_of(answer: Any) -> list[str]:
    """Return the texts of completions that give an answer, the plainest first."""
    text = str(answer)
    bodies = dict.fromkeys((text, f"\\boxed{{{text}}}", text.rpartition("####")[2].strip()))
    return [thought + body for thought in THOUGHTS for body in bodies]


def completion(text: str, tokenizer: Any, stop: int) -> Completion:
    """Return a completion as a backend gives it, which ends by itself."""
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], stop]
    return Completion("audit", tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")
