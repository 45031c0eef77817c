"""The one list of advantages, policy losses and KL estimators; keys, help, checks and metrics follow it.

Each names its function as a user names one of his own: `module:function`, or `file.py:function`. Functions are imported
when a run asks for them, so this page imports no torch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.engine.rl.user_functions import NotFoundError, load
from isoloss.parallel.errors import UserError


@dataclass(frozen=True)
class Advantage:
    """How rewards become advantages.

    function: of the rewards of all completions, (rewards_S, group_S, valid_S) -> advantages_S: fp64, the prompt of each
        and whether it has a reward.
    by_token: of the rewards of the tokens of one completion, whitened over the batch.
    critic: it also takes a critic's values, and gives returns.
    compares: a completion is compared with others of its prompt, so there must be two.
    whitened: scaled to mean 0 and variance 1 over all tokens of the batch.
    """

    function: str
    by_token: bool = False
    critic: bool = False
    compares: bool = True
    whitened: bool = False


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of the policy.

    function: of the tokens of a micro-batch, (inputs: TokenInputs, algorithm: AlgorithmConfig) -> [N], a term for each.
    ratio: of what it clips the ratio of probabilities: each token or its sequence; None: it has none.
    constant: the clipped ratio is a weight without a gradient, so clipping counts wherever it changes the ratio.
    aggregation: the only loss.aggregation that it is defined for; None: any.
    """

    function: str
    ratio: Literal["token", "sequence"] | None = None
    constant: bool = False
    aggregation: str | None = None

    @property
    def may_have_ratio(self) -> bool:
        """A function of the user's may, too."""
        return self.ratio is not None or self.function not in _OWN


_ADVANTAGES, _LOSSES = "isoloss.engine.rl.advantages", "isoloss.engine.rl.losses"
ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": Advantage(f"{_ADVANTAGES}:grpo"),
    "dr-grpo": Advantage(f"{_ADVANTAGES}:dr_grpo"),
    "rloo": Advantage(f"{_ADVANTAGES}:rloo"),
    "reinforce++": Advantage(f"{_ADVANTAGES}:discounted_returns", by_token=True, compares=False, whitened=True),
    "reinforce++-baseline": Advantage(f"{_ADVANTAGES}:dr_grpo", whitened=True),
    "gae": Advantage(f"{_ADVANTAGES}:gae", by_token=True, critic=True, compares=False, whitened=True),
}
LOSSES: Mapping[str, PolicyLoss] = {
    "clip": PolicyLoss(f"{_LOSSES}:clip_loss", ratio="token"),
    "gspo": PolicyLoss(f"{_LOSSES}:gspo_loss", ratio="sequence", aggregation="seq-mean-token-mean"),
    "cispo": PolicyLoss(f"{_LOSSES}:cispo_loss", ratio="token", constant=True),
    "reinforce": PolicyLoss(f"{_LOSSES}:reinforce_loss"),
}
_OWN = {loss.function for loss in LOSSES.values()}
KL_ESTIMATORS: Mapping[str, str] = {"k1": f"{_LOSSES}:k1", "k2": f"{_LOSSES}:k2", "k3": f"{_LOSSES}:bounded_k3"}


def advantage_of(name: str) -> Advantage:
    """Of a name of the list, or of a function of the user's."""
    return ADVANTAGES.get(name) or Advantage(name, compares=False)


def loss_of(name: str) -> PolicyLoss:
    """Of a name of the list, or of a function of the user's."""
    return LOSSES.get(name) or PolicyLoss(name)


def imported(function: str, key: str) -> Callable[..., Any]:
    """The function of that name. Raises UserError that begins with `key`, where it is named."""
    try:
        return load(function)
    except NotFoundError as error:
        raise UserError(f"{key}={function} {error}") from None


def check_functions(advantage: str, loss: str) -> None:
    """Raises UserError where a function of the user's cannot be had, or takes other arguments than it will get."""
    of_advantage = imported(advantage_of(advantage).function, "algorithm.advantage")
    of_loss = imported(loss_of(loss).function, "algorithm.loss")
    if advantage not in ADVANTAGES:
        _check_call(f"algorithm.advantage={advantage}", of_advantage, "(rewards_S, group_S, valid_S)", *"RGV")
    if loss not in LOSSES:
        _check_call(f"algorithm.loss={loss}", of_loss, "(inputs, algorithm)", "I", algorithm="A")


def _check_call(named: str, function: Callable[..., Any], call: str, *arguments: Any, **keywords: Any) -> None:
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        raise UserError(f"{named} must take {call}: {error}") from None
