"""A policy that moves away from its reference; runs on every rank."""

from unittest import mock

from support.runs.training import same, weights

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.rl import reference
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.tools.prove.parity import thaw


def passes(config: Config, frozen: bytes, offload: bool, piece: int) -> tuple[bool, bool, bool]:
    """After each of two steps, in pieces of so many bytes: whether the reference says what the policy said in the
    beginning, whether the policy says something else, and whether its weights stayed bit-equal. All of both."""
    with mock.patch.object(reference, "PIECE", piece):
        engine, samples = Engine(config), thaw(frozen)
        kept = reference.Reference(engine, offload=offload)
        wanted = [each.tolist() for each in engine.logprobs(samples)]
        says, moved, stays = [], [], []
        for _ in range(2):
            engine.train_step(samples, cross_entropy(LossConfig()))
            before = weights(engine)
            says.append([each.tolist() for each in kept.logprobs(samples, 1.0)] == wanted)
            moved.append([each.tolist() for each in engine.logprobs(samples)] != wanted)
            stays.append(same(weights(engine), before))
        return all(says), all(moved), all(stays)
