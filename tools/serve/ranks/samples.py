"""Data of clients as samples of the engine. Shape suffixes: T tokens of one sample, K targets of a position."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.parallel import UserError
from isoloss.tools.serve.wire import TARGETS, Datum


def to_sample(datum: Datum, fields: Sequence[str], id: str) -> Sample:
    """Return the sample of a datum, whose targets need not be its own next tokens, with these fields.

    A sample predicts position t from the tokens before t, so a last token is added, which no target's prediction reads.
    Raises UserError where the datum lacks a field; missing weights are 1.
    """
    targets = datum.inputs[TARGETS]
    if targets.ndim == 2 and "weights" not in fields:
        raise UserError(f"{id}: several targets a position ({TARGETS} [N, K]) need loss_fn=cross_entropy")
    tokens_T = torch.from_numpy(np.append(datum.tokens, datum.tokens[-1]))
    values = {}
    for name in fields:
        given = datum.inputs.get(name)
        if given is None:
            if name != "weights":
                raise UserError(f"{id} has no {name!r}, which the loss reads; it has {', '.join(datum.inputs)}")
            given = np.ones(targets.shape, np.float32)
        values[name] = _shifted(torch.tensor(given).double())
    mask_T = torch.arange(len(tokens_T)) > 0
    return Sample(tokens_T, mask_T, fields=values, id=id, targets_T=_shifted(torch.tensor(targets)))


def _shifted(values_T: Tensor) -> Tensor:
    """Return the values with a first row that nothing reads."""
    return torch.cat([torch.zeros_like(values_T[:1]), values_T])
