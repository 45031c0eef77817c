"""What a policy loss reads of a rollout, made up: a proof needs advantages and log-probabilities, no reward."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.rl.config import RLConfig
from isoloss.engine.step.engine import Engine
from isoloss.tools.prove.parity import thaw


def rollout_fields(near_T: np.ndarray, mask_T: Tensor, rng: np.random.Generator) -> dict[str, Tensor]:
    """The fields of one sample (engine/rl/losses.py), and a critic's: [T] fp64 each, 0 where mask_T is False.

    near_T: log-probabilities near the policy's own, those of the policy that generated. The backend's have a tail.
    """
    length = len(near_T)
    fields = {
        "advantages": np.full(length, rng.normal()),
        "rollout_logprobs": near_T + rng.normal(0, 0.1, length) - 0.7 * (np.arange(length) % 11 == 7),
        "ref_logprobs": near_T + rng.normal(0, 0.2, length),
        "returns": rng.normal(0, 0.3, length),
        "old_values": rng.normal(0, 0.2, length),
        "train_logprobs": near_T,
    }
    return {name: torch.from_numpy(values) * mask_T for name, values in fields.items()}


def older_logprobs(config: RLConfig, frozen: bytes, seed: int) -> list[np.ndarray]:
    """Log-probabilities of every sample's targets that differ from the model's own as those of an older policy do: by
    0.3 nats, enough for ratios beyond the usual clipping on both sides. On every rank; collectives as
    `Engine.logprobs`."""
    rng = np.random.default_rng(seed)
    own: Sequence[Tensor] = Engine(config).logprobs(thaw(frozen), config.rollout.temperature)
    return [values_T.numpy(force=True) + rng.normal(0, 0.3, len(values_T)) for values_T in own]
