"""List the advantages, policy losses and KL estimators; keys, help, checks and metrics follow this list.

An entry names its function as a user does: `module:function`, or `file.py:function`. Functions are imported when a run
uses them, so this module imports no torch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.engine.rl.user_functions import NotFoundError, load
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class Advantage:
    """A rule that turns rewards into advantages.

    function: name of a function of all completions, (rewards_S, group_S, valid_S) -> advantages_S: their rewards, fp64,
        the number of each one's prompt, and whether it has a reward.
    by_token: a function of one completion, called with the rewards of its tokens.
    critic: a function that also takes a critic's values, and also returns returns.
    compares: comparison of a completion with others of its prompt, so there must be two.
    whitened: scaling of the advantages to mean 0 and variance 1 over all tokens of the batch.
    """

    function: str
    by_token: bool = False
    critic: bool = False
    compares: bool = True
    whitened: bool = False


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of the policy.

    function: name of a function (inputs: TokenInputs, algorithm: AlgorithmConfig) -> [N], a term for each token.
    ratio: unit whose ratio of probabilities is clipped, a token or its sequence; None: the loss has no ratio.
    constant: use of the clipped ratio as a weight without a gradient: clipping counts wherever it changes the ratio.
    aggregation: the only loss.aggregation that the loss is defined for; None: any.
    """

    function: str
    ratio: Literal["token", "sequence"] | None = None
    constant: bool = False
    aggregation: str | None = None

    @property
    def may_have_ratio(self) -> bool:
        """Return whether the loss may have a ratio: a function of the user's may."""
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
    """Return the advantage of a name in the list, or of a function of the user's."""
    return ADVANTAGES.get(name) or Advantage(name, compares=False)


def loss_of(name: str) -> PolicyLoss:
    """Return the loss of a name in the list, or of a function of the user's."""
    return LOSSES.get(name) or PolicyLoss(name)


def imported(function: str, key: str) -> Callable[..., Any]:
    """Import and return the function. Raises UserError that begins with `key`, the key that names it."""
    try:
        return load(function)
    except NotFoundError as error:
        raise UserError(f"{key}={function} {error}") from None


def check_functions(advantage: str, loss: str, given_loss: Callable[..., Any] | None = None) -> None:
    """Raise UserError where a function of the user's cannot be imported, or takes other arguments than it will get.

    given_loss: the function itself that `loss` names.
    """
    of_advantage = imported(advantage_of(advantage).function, "algorithm.advantage")
    of_loss = given_loss or imported(loss_of(loss).function, "algorithm.loss")
    if advantage not in ADVANTAGES:
        _check_call(f"algorithm.advantage={advantage}", of_advantage, "(rewards_S, group_S, valid_S)", *"RGV")
    if loss not in LOSSES:
        _check_call(f"algorithm.loss={loss}", of_loss, "(inputs, algorithm)", "I", algorithm="A")


def _check_call(named: str, function: Callable[..., Any], call: str, *arguments: Any, **keywords: Any) -> None:
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        raise UserError(f"{named} must take {call}: {error}") from None
