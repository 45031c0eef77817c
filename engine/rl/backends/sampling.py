"""Which token comes next: by random numbers that are a function of (seed, request id, position, token), so that what a
row draws depends on nothing else.

Shape suffixes: B rows of the batch, V the vocabulary.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from isoloss.engine.rl.trajectory import Sampling


def noise_key(seed: int, request_id: str, position: int) -> int:
    """Which random numbers one token of a completion is drawn with: 64 bits, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}/{request_id}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exponentials(keys_B: Sequence[int], num: int, device: torch.device) -> Tensor:
    """Standard exponential random numbers of each key, [B, num] fp64: the same on every device up to rounding.

    Number v is made of output v of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators") that starts from the key: a function of (key, v), so nothing is kept between tokens. int64 arithmetic
    wraps around like that of unsigned integers.
    """
    return _Race(len(keys_B), num, device).exponentials(keys_B)


class _Race:
    """Room for the numbers of some rows, which is used again: fresh memory takes longer than what is done with it."""

    def __init__(self, rows: int, num: int, device: torch.device):
        self._steps_V = torch.arange(1, num + 1, device=device) * _signed(0x9E3779B97F4A7C15)
        self._bits, self._shifted = torch.empty((2, rows, num), dtype=torch.int64, device=device)
        self._exponentials, self._weights = torch.empty((2, rows, num), dtype=torch.float64, device=device)

    def exponentials(self, keys_B: Sequence[int]) -> Tensor:
        """See above. Valid until the next call."""
        rows = len(keys_B)
        bits, shifted, out = self._bits[:rows], self._shifted[:rows], self._exponentials[:rows]
        torch.add(self._steps_V, torch.tensor(keys_B, dtype=torch.int64, device=bits.device)[:, None], out=bits)

        def shift(by: int) -> Tensor:
            """bits to the right as unsigned integers: zeros come in from the left."""
            return torch.bitwise_right_shift(bits, by, out=shifted).bitwise_and_((1 << (64 - by)) - 1)

        bits.bitwise_xor_(shift(30)).mul_(_signed(0xBF58476D1CE4E5B9))
        bits.bitwise_xor_(shift(27)).mul_(_signed(0x94D049BB133111EB))
        bits.bitwise_xor_(shift(31))
        # Of 2^52 equal parts of (0, 1) the middle of one: exact in fp64, and neither 0 nor 1.
        return out.copy_(shift(12)).add_(0.5).mul_(-(2.0**-52)).log1p_().neg_()

    def choose(self, logits_BV: Tensor, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
        """See `choose`."""
        weights_BV = self._weights[: len(keys_B)].copy_(logits_BV).div_(sampling.temperature or 1.0)
        weights_BV = weights_BV.sub_(weights_BV.amax(1, keepdim=True)).exp_()
        total_B1 = weights_BV.sum(1, keepdim=True)
        if sampling.temperature == 0:
            tokens_B1 = logits_BV.argmax(1, keepdim=True)
        else:
            race_BV = weights_BV if sampling.top_p >= 1 else _nucleus(weights_BV / total_B1, sampling.top_p)
            exponentials_BV = self.exponentials(keys_B)
            tokens_B1 = torch.div(race_BV, exponentials_BV, out=exponentials_BV).argmax(1, keepdim=True)
        return tokens_B1.squeeze(1), (weights_BV.gather(1, tokens_B1) / total_B1).log().squeeze(1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64)


NEAR = 1 << 15  # numbers that a core of a CPU keeps close by


def choose(logits_BV: Tensor, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that the random numbers of the keys (`noise_key`) pick, [B], and their log-probabilities, [B] fp64.

    The largest of probability / exponential, which is the Gumbel-max trick without its logarithms (Maddison et al.
    2014, arXiv 1411.0030), in fp64. Every token has a number of its own, so logits that differ a little pick another
    token about as rarely as their distributions differ; an inverse cumulative distribution would move the borders of
    all tokens behind the one that changed. With top_p over the nucleus (arXiv:1904.09751): the fewest tokens whose
    probabilities reach top_p, of equal ones the earlier in the vocabulary. Temperature 0 picks the largest logit.
    """
    rows, num = logits_BV.shape
    if logits_BV.is_cpu:
        rows = min(rows, max(1, NEAR // num))
    race = _Race(rows, num, logits_BV.device)
    starts = range(0, len(keys_B), rows)
    parts = [race.choose(logits_BV[at : at + rows], keys_B[at : at + rows], sampling) for at in starts]
    tokens, logprobs = zip(*parts)
    return torch.cat(tokens), torch.cat(logprobs)


def _nucleus(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """The probabilities of the nucleus, 0 elsewhere."""
    if top_p >= 1:
        return probabilities_BV
    descending_BV, order_BV = torch.sort(probabilities_BV, dim=-1, descending=True, stable=True)
    before_BV = descending_BV.cumsum(-1) - descending_BV
    return torch.zeros_like(probabilities_BV).scatter(1, order_BV, descending_BV * (before_BV < top_p))
