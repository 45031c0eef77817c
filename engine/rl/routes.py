"""The experts that a sampler chose for the tokens that it read, on the way from a rollout backend to `Sample.routes`.

Rows are of the tokens of a prompt and its completion, [T, L, X] int16: L layers with experts, X experts chosen for a
token. A row of `UNKNOWN` is not known: the last token of a completion is never read by its sampler.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isoloss.engine.batching.sample import UNKNOWN
from isoloss.models.architecture import Architecture


@dataclass(frozen=True)
class RoutesForm:
    """The form of the routes of a model.

    layers: number of its layers. sparse: indices of those with experts.
    experts: experts of such a layer. chosen: those that compute a token.
    """

    layers: int
    sparse: tuple[int, ...]
    experts: int
    chosen: int

    @classmethod
    def of(cls, arch: Architecture) -> "RoutesForm":
        """Return the form of a model with experts."""
        assert arch.experts is not None, "rules refuse rollout.routing_replay for a dense model"
        sparse = tuple(index for index, sparse in enumerate(arch.sparse) if sparse)
        return cls(len(arch.sparse), sparse, arch.experts.count, arch.experts.top_k)

    def unknown(self, tokens: int) -> np.ndarray:
        """Return rows of which nothing is known."""
        return np.full((tokens, len(self.sparse), self.chosen), UNKNOWN, dtype=np.int16)


def known_rows(routes: np.ndarray | None) -> int:
    """Return how many tokens there are before the first one whose row is not known."""
    if routes is None:
        return 0
    unknown = (routes == UNKNOWN).all((1, 2))
    return int(unknown.argmax()) if unknown.any() else len(routes)


def continued(first: np.ndarray | None, then: np.ndarray | None, total: int) -> np.ndarray | None:
    """Return the rows of `total` tokens, of which `first` has those of a beginning.

    then: rows of the same prompt and completion, from its first token. Where both know a row, it is the first one: the
        sampler that made the tokens behind it chose these.
    """
    if first is None or then is None:
        return then if first is None else _longer(first, total)
    first = _longer(first, len(then))
    return np.where(first == UNKNOWN, then, first)


def stacked(rows: Sequence[np.ndarray], form: RoutesForm, tokens: int) -> np.ndarray:
    """Return the rows of the first tokens, [L, X] each, as those of all `tokens`."""
    routes = form.unknown(tokens)
    if rows:
        routes[: len(rows)] = np.stack(rows)
    return routes


def _longer(routes: np.ndarray, tokens: int) -> np.ndarray:
    return np.pad(routes, ((0, tokens - len(routes)), (0, 0), (0, 0)), constant_values=UNKNOWN)
