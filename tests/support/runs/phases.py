"""Moments of a run that something can be done at, each before or after a function of the product."""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Moment:
    """where: MODULE:FUNCTION or MODULE:CLASS.METHOD, which is waited for (`after`) or has yet to begin."""

    name: str
    where: str
    after: bool = False


_RUN, _ENGINE = "isoloss.engine.run.run", "isoloss.engine.step.engine"
_SAVER, _CHECKPOINT = "isoloss.engine.checkpoint.saver", "isoloss.engine.checkpoint.checkpoint"
_ROLLOUT, _LOOP = "isoloss.engine.rl.rollout", "isoloss.engine.rl.loop"
_AHEAD = "isoloss.engine.rl.in_flight"
_REWARDER, _REWARDS = "isoloss.engine.rl.reward.rewarder", "isoloss.engine.rl.reward.pool"
_SERVER = "isoloss.engine.rl.backends.sglang.server"

STEP = (
    Moment("before a step", f"{_ENGINE}:Engine.train_step"),
    Moment("gradients, no step yet", f"{_ENGINE}:Engine.optim_step"),
    Moment("new weights, not told", f"{_ENGINE}:Engine.train_step", after=True),
    Moment("told, not saved", f"{_RUN}:Run.log", after=True),
)
SAVE = (
    Moment("before a save", f"{_SAVER}:Saver.save"),
    Moment("in a save, before its files", f"{_CHECKPOINT}:Share.write"),
    Moment("in a save, its tensors written", f"{_CHECKPOINT}:Share.write", after=True),
    Moment("in a save, all but the name", f"{_CHECKPOINT}:Staged._describe", after=True),
    Moment("saved, the old ones there", f"{_SAVER}:prune"),
    Moment("saved", f"{_SAVER}:prune", after=True),
)
LOAD = (
    Moment("before loading", f"{_ENGINE}:Engine.load"),
    Moment("loaded", f"{_ENGINE}:Engine.load", after=True),
)
SFT = (*STEP, Moment("evaluation", f"{_ENGINE}:Engine.evaluate"), *SAVE, *LOAD)
_EXPERIENCE = (
    Moment("weight sync", f"{_ROLLOUT}:Rollout.sync_weights"),
    Moment("weights synced", f"{_ROLLOUT}:Rollout.sync_weights", after=True),
    Moment("generation", f"{_ROLLOUT}:Rollout._generate"),
    Moment("generated", f"{_ROLLOUT}:Rollout._generate", after=True),
    Moment("amid rewards", f"{_REWARDS}:RewardPool._receive"),
    Moment("rewarded", f"{_REWARDER}:Rewarder.score", after=True),
    Moment("before log-probabilities", f"{_LOOP}:with_logprobs"),
    Moment("log-probabilities, no advantages", f"{_LOOP}:with_logprobs", after=True),
    Moment("advantages, no step", f"{_LOOP}:with_advantages", after=True),
    Moment("batch told, no step", "isoloss.engine.rl.report:RolloutLog.batch", after=True),
    Moment("evaluated", f"{_ROLLOUT}:Rollout.evaluate", after=True),
)
_IN_PROCESS = (
    Moment("amid generation", "isoloss.engine.rl.backends.local.continuous_batching:RowScheduler._advance"),
    Moment(
        "amid a weight sync", "isoloss.engine.rl.backends.local.transformers_backend:TransformersBackend.update_weights"
    ),
)
_SERVERS = (
    Moment("amid generation", f"{_SERVER}:SGLangServer.generate"),
    Moment("completions under way", f"{_SERVER}:SGLangServer.generate", after=True),
    Moment("before an update of a server", f"{_SERVER}:SGLangServer.begin_update"),
    Moment("weights sent, no version", f"{_SERVER}:SGLangServer.set_weight_version"),
)
GRPO = (*_EXPERIENCE, *_IN_PROCESS, *STEP, *SAVE, *LOAD)
# What servers make different, and some of the rest.
_ALSO = {
    "weights synced", "generation", "generated", "amid rewards", "advantages, no step", "gradients, no step yet",
    "told, not saved", "in a save, its tensors written", "saved, the old ones there", "loaded",
}  # fmt: skip
GRPO_SERVERS = (*_SERVERS, *(each for each in GRPO if each.name in _ALSO))
GRPO_AHEAD = (
    Moment("begun ahead", f"{_AHEAD}:InFlight.begin", after=True),
    Moment("waiting for a batch", f"{_AHEAD}:InFlight.take"),
    Moment("a batch taken", f"{_AHEAD}:InFlight.take", after=True),
    Moment("ended for an update", f"{_AHEAD}:InFlight.harvest", after=True),
    *GRPO_SERVERS,
)
WRITING = Moment("writing", f"{_SAVER}:Saver._write")
MOMENTS = {"sft": SFT, "grpo": GRPO, "servers": GRPO_SERVERS, "ahead": GRPO_AHEAD}


def watch(moments: Sequence[Moment], reached: Callable[[str], None]) -> None:
    """From now on, in this process, reached(name) is called whenever a moment comes, by the thread that comes to it."""
    for moment in moments:
        module, _, path = moment.where.partition(":")
        owner: Any = importlib.import_module(module)
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        setattr(owner, name, _watched(getattr(owner, name), moment, reached))


def _watched(function: Callable[..., Any], moment: Moment, reached: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **options: Any) -> Any:
        if not moment.after:
            reached(moment.name)
        result = function(*args, **options)
        if moment.after:
            reached(moment.name)
        return result

    return watched
