"""Versions of an engine's weights; runs on every rank."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.trajectory import Request, Sampling
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.versions import BASE, WeightVersions
from isoloss.models.lora.config import LoraConfig
from isoloss.parallel import UserError
from support.models.lora import LORA, make_engine
from support.models.transformers_parity import TOKEN_MEAN

SAMPLING = Sampling(12, temperature=0.8, seed=7)
PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8), (9,), (2, 4)]


def seen(engine: Engine) -> tuple[list[Any], list[Tensor]]:
    with closing(MegatronBackend(engine, 4)) as backend:
        backend.update_weights((), 1)
        found = backend.generate([Request(str(k), prompt) for k, prompt in enumerate(PROMPTS)], SAMPLING)
        if not backend.rank0.here:
            found = []
    completions = [(each.tokens, each.logprobs) for each in found if each is not None]
    return completions, [each.logprobs_T[1:] for each in engine.prompt_logprobs(PROMPTS)]


def equal(one: tuple[list[Any], list[Tensor]], other: tuple[list[Any], list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def check(folder: Path, samples: list[Sample], rank: int, parallel: dict) -> None:
    """Sample from version 1 before and after two steps, and amid one; training is that of an engine left alone."""
    lora = LORA if rank else LoraConfig()
    ends = []
    for disturbed in (False, True):
        engine = make_engine(folder, lora, precision="fp32", **parallel)
        versions, before = WeightVersions(), None
        if disturbed:
            before = seen(engine)
            assert versions.take(engine) == 1
        for _ in range(2):
            engine.forward_backward(samples, TOKEN_MEAN)
            if disturbed:
                with versions.using(engine, 1):
                    assert equal(seen(engine), before)
                    with pytest.raises(ValueError, match="another version of its weights"):
                        engine.optim_step()
                    with pytest.raises(ValueError, match="another version of its weights"):
                        engine.forward_backward(samples, TOKEN_MEAN)
            assert engine.optim_step().applied
        if disturbed:
            now = seen(engine)
            assert not equal(now, before)
            assert versions.take(engine) == 2
            with versions.using(engine, 1):
                assert equal(seen(engine), before)
            with versions.using(engine, 2):
                assert equal(seen(engine), now)
            assert equal(seen(engine), now)
            if rank:
                with versions.using(engine, BASE):
                    base = seen(engine)
                assert equal(seen(engine), now)
                adapter = engine.adapter(LoraConfig(rank=rank, alpha=9.0, seed=2))
                with pytest.raises(UserError, match="version 1 is of another model, or of an adapter with other lora"):
                    versions.using(adapter, 1).__enter__()
            versions.drop(1)
            with pytest.raises(UserError, match=r"there is no version 1: .* \(there are: 2\)"):
                versions.drop(1)
        engine.forward_backward(samples, TOKEN_MEAN)
        engine.optim_step()
        engine.whole_model()
        ends.append([tensor.detach().clone() for tensor in engine.trained.tensors()])
    assert all(map(torch.equal, *ends))
    if rank:
        assert equal(seen(make_engine(folder, LoraConfig(), precision="fp32", **parallel)), base)
    else:
        with pytest.raises(UserError, match=r"lora\.rank=0: there is no model without its adapter"):
            WeightVersions().using(engine, BASE).__enter__()
