"""Which token comes next: by random numbers that are a function of (seed, request id, position, token), so that what a
row draws depends on nothing else.

Shape suffixes: B rows of the batch, V the vocabulary.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.rl.trajectory import Sampling

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
ROOM = 1 << 18  # numbers that a CPU passes over at a time
SLACK = 1e-4  # of a bound, relative: more than what it is rounded by


def noise_key(seed: int, request_id: str, position: int) -> int:
    """Which random numbers one token of a completion is drawn with: 64 bits, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}/{request_id}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exponentials(keys_B: Sequence[int], num: int, device: torch.device) -> Tensor:
    """Standard exponential random numbers of each key, [B, num] fp64: the same on every device up to rounding.

    Number v is made of output v of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators") that starts from the key: a function of (key, v), so nothing is kept between tokens.
    """
    tokens_V = torch.arange(num, device=device)
    return _exponentials(torch.tensor(keys_B, dtype=torch.int64, device=device)[:, None], tokens_V)


def _exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return exponential variates of these keys and tokens, whose shapes are broadcast. int64 arithmetic wraps around
    like that of unsigned integers."""

    def shifted(bits: Tensor, by: int) -> Tensor:
        """To the right as unsigned integers: zeros come in from the left."""
        return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)

    bits = keys + (tokens + 1) * _signed(GAMMA)
    bits = (bits ^ shifted(bits, 30)) * _signed(FIRST)
    bits = (bits ^ shifted(bits, 27)) * _signed(SECOND)
    bits = bits ^ shifted(bits, 31)
    # Of 2^52 equal parts of (0, 1) the middle of one: exact in fp64, and neither 0 nor 1.
    return shifted(bits, 12).double().add_(0.5).mul_(-(2.0**-52)).log1p_().neg_()


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64)


def choose(logits_BV: Tensor, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that the random numbers of the keys (`noise_key`) pick, [B], and their log-probabilities, [B] fp64.

    The largest of probability / exponential, which is the Gumbel-max trick without its logarithms (Maddison et al.
    2014, arXiv 1411.0030), in fp64. Every token has a number of its own, so logits that differ a little pick another
    token about as rarely as their distributions differ; an inverse cumulative distribution would move the borders of
    all tokens behind the one that changed. With top_p over the nucleus (arXiv:1904.09751): the fewest tokens whose
    probabilities reach top_p; with top_k among that many of the most probable ones. Of equal ones the earlier in the
    vocabulary. Temperature 0 picks the largest logit.
    """
    if logits_BV.is_cpu and sampling.temperature > 0 and not _cuts(sampling):
        return _choose_by_bounds(logits_BV, keys_B, sampling.temperature)
    return choose_directly(logits_BV, keys_B, sampling)


def choose_directly(logits_BV: Tensor, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
    """`choose`, by the ratios of all tokens."""
    weights_BV = logits_BV.double() / (sampling.temperature or 1.0)
    weights_BV = (weights_BV - weights_BV.amax(1, keepdim=True)).exp()
    total_B1 = weights_BV.sum(1, keepdim=True)
    if sampling.temperature == 0:
        tokens_B1 = logits_BV.argmax(1, keepdim=True)
    else:
        race_BV = _most_probable(weights_BV / total_B1, sampling) if _cuts(sampling) else weights_BV
        tokens_B1 = (race_BV / exponentials(keys_B, logits_BV.shape[1], logits_BV.device)).argmax(1, keepdim=True)
    return tokens_B1.squeeze(1), (weights_BV.gather(1, tokens_B1) / total_B1).log().squeeze(1)


def _choose_by_bounds(logits_BV: Tensor, keys_B: Sequence[int], temperature: float) -> tuple[Tensor, Tensor]:
    """`choose` from the whole vocabulary on a CPU, in half the time that it takes for all ratios.

    An exponential is -log(1 - u), hence at least u: probability / u, in fp32, is a bound of the exact ratio. Only
    tokens whose bound reaches the exact ratio of one of them are computed exactly: one or two of a row.
    """
    num = logits_BV.shape[1]
    rows = min(len(keys_B), max(1, ROOM // num))
    bounds = _Bounds(rows, num, logits_BV.dtype)
    parts = zip(logits_BV.split(rows), torch.tensor(keys_B, dtype=torch.int64).split(rows))
    tokens, logprobs = zip(*(_choose_in_room(bounds, logits, keys, temperature) for logits, keys in parts))
    return torch.cat(tokens), torch.cat(logprobs)


def _choose_in_room(bounds: "_Bounds", logits_BV: Tensor, keys_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    top_B = logits_BV.amax(1)
    bounds_BV, total_B = bounds.of(logits_BV, keys_B, top_B, temperature)

    def log_weights(rows_C: Tensor, tokens_C: Tensor) -> Tensor:
        return logits_BV[rows_C, tokens_C].double() / temperature - top_B[rows_C].double() / temperature

    def ratios(rows_C: Tensor, tokens_C: Tensor) -> Tensor:
        return log_weights(rows_C, tokens_C).exp() / _exponentials(keys_B[rows_C], tokens_C)

    all_B, chosen_B = torch.arange(len(keys_B)), torch.from_numpy(bounds_BV.argmax(1))
    best_B = ratios(all_B, chosen_B)
    reach = np.flatnonzero(bounds_BV >= (best_B * (1 - SLACK)).float().numpy()[:, None])
    rows_C, tokens_C = (torch.from_numpy(index) for index in np.divmod(reach, logits_BV.shape[1]))
    # Of equal ratios the earlier in the vocabulary, as argmax has it.
    best = list(zip(best_B.tolist(), (-chosen_B).tolist()))
    for row, *of_token in zip(rows_C.tolist(), ratios(rows_C, tokens_C).tolist(), (-tokens_C).tolist()):
        best[row] = max(best[row], tuple(of_token))
    chosen_B = torch.tensor([-token for _, token in best])
    return chosen_B, log_weights(all_B, chosen_B) - total_B.log()


class _Bounds:
    """Room for what a CPU computes of some rows, which is used again: fresh memory takes longer than what is done with
    it. In numpy, which has unsigned integers, and faster kernels for them than torch."""

    def __init__(self, rows: int, num: int, dtype: torch.dtype):
        self._counters_V = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(GAMMA)
        self._bits, self._shifted = np.empty((2, rows, num), dtype=np.uint64)
        self._weights = torch.empty((rows, num), dtype=dtype).numpy()
        self._bounds = np.empty((rows, num), dtype=np.float32)

    def of(self, logits_BV: Tensor, keys_B: Tensor, top_B: Tensor, temperature: float) -> tuple[np.ndarray, Tensor]:
        """Bounds of the ratios, [B, V] fp32 and valid until the next call, and the sum of the weights, [B] fp64.

        top_B: the largest logit of each row, whose weight is 1.
        """
        count = len(keys_B)
        bits, shifted, bounds, weights = (
            room[:count] for room in (self._bits, self._shifted, self._bounds, self._weights)
        )
        np.subtract(logits_BV.numpy(), top_B.numpy()[:, None], out=weights)
        if temperature != 1:
            np.divide(weights, temperature, out=weights)
        np.exp(weights, out=weights)
        np.add(self._counters_V, keys_B.numpy().view(np.uint64)[:, None], out=bits)
        for by, factor in ((30, FIRST), (27, SECOND)):
            np.bitwise_xor(bits, np.right_shift(bits, np.uint64(by), out=shifted), out=bits)
            np.multiply(bits, np.uint64(factor), out=bits)
        # u, rounded down to the 24 bits that fp32 holds and the last shift of SplitMix64 leaves alone. Where they are
        # 0, less than any u.
        np.copyto(bounds, np.right_shift(bits, np.uint64(40), out=shifted).view(np.int64), casting="same_kind")
        np.multiply(bounds, np.float32(2.0**-24), out=bounds)
        np.add(bounds, np.float32(2.0**-54), out=bounds)
        np.divide(weights, bounds, out=bounds, casting="same_kind")
        return bounds, torch.from_numpy(weights.sum(1, dtype=np.float64))


def _cuts(sampling: Sampling) -> bool:
    """Return whether some tokens of the vocabulary may never be drawn."""
    return sampling.top_p < 1 or sampling.top_k > 0


def _most_probable(probabilities_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of the tokens that top_k and top_p leave, 0 elsewhere."""
    descending_BV, order_BV = torch.sort(probabilities_BV, dim=-1, descending=True, stable=True)
    kept_BV = torch.zeros_like(probabilities_BV)
    if sampling.top_p < 1:
        before_BV = descending_BV.cumsum(-1) - descending_BV
        descending_BV = descending_BV * (before_BV < sampling.top_p)
    if sampling.top_k > 0:
        descending_BV, order_BV = descending_BV[:, : sampling.top_k], order_BV[:, : sampling.top_k]
    return kept_BV.scatter(1, order_BV, descending_BV)
