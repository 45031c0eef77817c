"""Cut a trajectory into samples: each token that the model made is a target once, behind what the model had read.

The turns of a trajectory make a tree: a turn continues another one if its prompt begins with all that the other read
and made. Token ids alone decide this. A program that rewrites its history, or that asks two things at once, makes
branches; a sample is the way to a leaf. A completion on several of these ways is a target on the first.

Shape suffix: T tokens of a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isoloss.engine.rl.routes import continued
from isoloss.engine.rl.trajectory import Trajectory, Turn


@dataclass(frozen=True)
class Path:
    """Tokens of turns each of which continues the one before.

    tokens_T: token ids, int64.
    turn_T: number of the turn that made the token, where the token is a target here; -1 elsewhere.
    logprobs_T: log-probabilities of the backend; 0 where the token was not made by the model.
    routes: see `Sample.routes`; of a token that several turns read, those of the first. None where no turn has any.
    """

    tokens_T: np.ndarray
    turn_T: np.ndarray
    logprobs_T: np.ndarray
    routes: np.ndarray | None = None


def paths_of(trajectory: Trajectory) -> list[Path]:
    """Return the paths of a trajectory that have targets, at least one path. A completion that is excluded is no
    target; it may still be what a later turn read."""
    turns, taken, paths = trajectory.turns, set[int](), list[Path]()
    above = parents(turns)
    for leaf in sorted({*range(len(turns))} - {*above}):
        way = [leaf]
        while above[way[-1]] >= 0:
            way.append(above[way[-1]])
        new = [number for number in way if number not in taken and turns[number].excluded is None]
        taken.update(new)
        if new:
            paths.append(_path(turns, way, new))
    if not paths:  # nothing to learn, but the trajectory is counted among those of its prompt
        tokens_T = np.asarray(trajectory.prompt.tokens, np.int64)
        paths.append(Path(tokens_T, np.full(len(tokens_T), -1), np.zeros(len(tokens_T))))
    return paths


def parents(turns: Sequence[Turn]) -> list[int]:
    """Return the turn that each turn continues: of the longest earlier ones the newest; -1 where there is none."""
    if len(turns) == 1:
        return [-1]
    read = [np.asarray(turn.prompt_tokens, np.int32).tobytes() for turn in turns]
    whole = [text + np.asarray(turn.completion.tokens, np.int32).tobytes() for text, turn in zip(read, turns)]
    found = []
    for number, text in enumerate(read):
        begins = [earlier for earlier in range(number) if text.startswith(whole[earlier])]
        found.append(max(begins, key=lambda earlier: (len(whole[earlier]), earlier), default=-1))
    return found


def _path(turns: Sequence[Turn], way: Sequence[int], targets: Sequence[int]) -> Path:
    leaf = turns[way[0]]
    tokens_T = np.concatenate([np.asarray(tokens, np.int64) for tokens in (leaf.prompt_tokens, leaf.completion.tokens)])
    turn_T, logprobs_T = np.full(len(tokens_T), -1), np.zeros(len(tokens_T))
    for number in way:
        start = len(turns[number].prompt_tokens)
        place = slice(start, start + len(turns[number].completion.tokens))
        logprobs_T[place] = np.asarray(turns[number].completion.logprobs, np.float64)
        if number in targets:
            turn_T[place] = number
    routes = None
    for number in reversed(way):  # from the first turn on
        turn = turns[number]
        routes = continued(routes, turn.completion.routes, len(turn.prompt_tokens) + len(turn.completion.tokens))
    return Path(tokens_T, turn_T, logprobs_T, routes)
