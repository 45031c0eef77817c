"""The sum and norm before an MLP, run on a CPU as on a GPU, but for the compiler."""

from collections.abc import Sequence
from unittest import mock

from support.runs import training

from isoloss.engine.config.schema import Config
from isoloss.models.mcore.layers import residual_norm


def gradients(config: Config, frozen: bytes, calls: Sequence[Sequence[int]]):
    """As `training.gradients`, and how often this rank added and normed at once."""
    with (
        mock.patch.object(residual_norm, "on_gpu", lambda hidden: True),
        mock.patch.object(residual_norm, "add_and_norm", wraps=residual_norm.add_and_norm) as at_once,
    ):
        norm, of_weights = training.gradients(config, frozen, calls)
    return norm, of_weights, at_once.call_count
