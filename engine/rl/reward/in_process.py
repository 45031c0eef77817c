"""Call reward functions in this process, those of a program's memory, and the others in worker processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isoloss.engine.rl.reward import worker
from isoloss.engine.rl.reward.pool import Call, Described, RewardPool
from isoloss.parallel.runtime.errors import UserError

Reward = Callable[..., Any]


class Calls:
    """Functions, each given itself or by its name, `file.py:function` or `module:function`.

    A function that is given itself runs in this process, one call after the other and without a time limit; it need not
    be importable, and may hold state. The others run in a `RewardPool`, which is not started if there are none.

    described: descriptions of the functions, in their order.
    num_workers, timeout, hidden: arguments of `RewardPool`.
    """

    def __init__(self, functions: Sequence[str | Reward], num_workers: int, timeout: float, hidden: str | None = None):
        self._here = {index: each for index, each in enumerate(functions) if not isinstance(each, str)}
        names = {index: each for index, each in enumerate(functions) if isinstance(each, str)}
        self._number_in_pool = {index: number for number, index in enumerate(names)}
        self._pool = RewardPool([*names.values()], num_workers if names else 0, timeout, hidden)
        away: Mapping[int, Described] = dict(zip(names, self._pool.described))
        here = {index: worker.described(function) for index, function in self._here.items()}
        self.described: list[Described] = [(away | here)[index] for index in range(len(functions))]

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Return the result of each call, in their order, or, as text, why it has none."""
        numbers = self._number_in_pool
        away = [replace(call, function=numbers[call.function]) for call in calls if call.function in numbers]
        results = iter(self._pool.run(away))
        return [
            next(results)
            if call.function in numbers
            else worker.call(self._here[call.function], call.arguments, call.batched)
            for call in calls
        ]

    def close(self) -> None:
        """End the workers; twice does no harm."""
        self._pool.close()


def named(rewards: Reward | str | Sequence[Reward | str]) -> dict[str, Reward | None]:
    """Return reward functions by the names that reward.function, metrics and messages give them: "module:function".

    None for one that is a name already. Raises UserError for what is no function, and where two have one name.
    """
    found: dict[str, Reward | None] = {}
    for each in [rewards] if isinstance(rewards, str) or callable(rewards) else rewards:
        if not isinstance(each, str) and not callable(each):
            raise UserError(f"reward={each!r} is no function: give a function, or a name as in reward.function")
        name = each if isinstance(each, str) else name_of(each)
        if name in found:
            raise UserError(f"reward has two functions called {name}: give each a name of its own (__name__)")
        found[name] = None if isinstance(each, str) else each
    return found


def name_of(function: Callable[..., Any]) -> str:
    """Return "module:function", by which a function of this process is named."""
    cls = type(function)
    name = getattr(function, "__qualname__", cls.__qualname__)
    return f"{getattr(function, '__module__', None) or cls.__module__}:{name}"
