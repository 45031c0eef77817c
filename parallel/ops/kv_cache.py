"""Attention of sequences that grow by a token at a time, to keys and values that are kept from token to token; and what
layers without attention keep.

Rows that go on from the same prompt read one copy of its keys and values. What a row sees of its prompt and of the
tokens behind it is merged before either is divided by its total.

Shape suffixes: B rows, M those of one prompt, P tokens of a prompt, T of the longest row behind its prompt, H query
heads, K key/value heads, F query heads for each of them, D width of a query or a key, U of a value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoloss.parallel.runtime.upload import upload

GROWTH = 64  # tokens that a row is given room for at a time


@dataclass
class _PartialAttention:
    """Attention to some keys, not yet divided by its total, so that what is seen of others can be added.

    top: the largest score, [..., 1].
    total: sum of exp(score - top), [..., 1].
    values: sum of exp(score - top) * value, [..., U].
    """

    top: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> "_PartialAttention":
        """Of scores [..., T] and values [..., T, U]. Uses up the scores."""
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        return cls(top, weights.sum(-1, keepdim=True), weights @ values)

    @classmethod
    def of_no_keys(cls, like: "_PartialAttention") -> "_PartialAttention":
        return cls(torch.full_like(like.top, -torch.inf), torch.zeros_like(like.total), torch.zeros_like(like.values))

    def put(self, rows: slice | list[int], seen: "_PartialAttention") -> None:
        """Of these rows: [B, K, F, ...] from [K, M * F, ...]."""
        for mine, theirs in ((self.top, seen.top), (self.total, seen.total), (self.values, seen.values)):
            mine[rows] = theirs.unflatten(1, (-1, mine.shape[2])).transpose(0, 1)

    def merged(self, other: "_PartialAttention") -> "_PartialAttention":
        """Of the keys of both."""
        top = torch.maximum(self.top, other.top)
        share, other_share = (self.top - top).exp_(), (other.top - top).exp_()
        total = self.total * share + other.total * other_share
        return _PartialAttention(top, total, self.values * share + other.values * other_share)


class _Layer:
    """Keys and values of one layer: of each prompt, [K, P, D] and [K, P, U], and of the tokens behind, [B, K, room, D]
    and [B, K, room, U]."""

    def __init__(self, prompts: list[tuple[Tensor, Tensor]]):
        self.prompts = prompts
        key_KPD, value_KPU = prompts[0]
        self.keys, self.values = (t.new_zeros((0, len(t), 0, t.shape[2])) for t in (key_KPD, value_KPU))


class KeyValueCache:
    """What the layers of a model keep of the rows that it decodes.

    prompts: tokens of each prompt. prompt_of: the prompt of each row.
    behind: tokens of each row behind its prompt whose keys are kept.
    """

    def __init__(self, prompts: Sequence[int], device: torch.device):
        self.prompts, self.prompt_of, self.behind = list(prompts), list[int](), list[int]()
        self._device, self._behind_B = device, torch.zeros(0, dtype=torch.int64, device=device)
        self._layers: dict[int, _Layer] = {}
        self._states: dict[int, list[Tensor]] = {}  # of layers without attention: [B, ...] each

    @property
    def _most(self) -> int:
        return max(self.behind, default=0)

    @property
    def reads_prompts(self) -> bool:
        """Whether no row goes on yet."""
        return not self.prompt_of

    # ---- its rows ---------------------------------------------------------------------------------------------------

    def begin(self, prompt_of: Sequence[int]) -> None:
        """The prompts were read: these rows go on from them."""
        self.prompt_of, self.behind = list(prompt_of), [0] * len(prompt_of)
        self._upload()
        for layer in self._layers.values():
            layer.keys, layer.values = (t.new_zeros((len(prompt_of), *t.shape[1:])) for t in (layer.keys, layer.values))
        self._take_states(prompt_of)

    def grown(self) -> None:
        """Every layer has seen the newest token of every row."""
        self.behind = [count + 1 for count in self.behind]
        self._upload()

    def _upload(self) -> None:
        self._behind_B = upload(torch.tensor(self.behind, dtype=torch.int64), self._device)

    def select(self, keep: Sequence[int]) -> None:
        """Let go of the other rows, and of prompts that only they had."""
        used = list(dict.fromkeys(self.prompt_of[k] for k in keep))
        self.prompt_of = [used.index(self.prompt_of[k]) for k in keep]
        self.prompts = [self.prompts[p] for p in used]
        self.behind = [self.behind[k] for k in keep]
        self._upload()
        rows = torch.tensor(keep, dtype=torch.int64, device=self._device)
        for layer in self._layers.values():
            layer.prompts = [layer.prompts[p] for p in used]
            layer.keys, layer.values = (t[rows, :, : self._most] for t in (layer.keys, layer.values))
        self._take_states(keep)

    def _take_states(self, of: Sequence[int]) -> None:
        rows = torch.tensor(of, dtype=torch.int64, device=self._device)
        self._states = {number: [t[rows] for t in kept] for number, kept in self._states.items()}

    def join(self, other: "KeyValueCache") -> None:
        """Take the rows of another, behind its own."""
        self.prompt_of += [len(self.prompts) + prompt for prompt in other.prompt_of]
        self.prompts += other.prompts
        self.behind += other.behind
        self._upload()
        for number, layer in self._layers.items():
            theirs = other._layers[number]
            layer.prompts += theirs.prompts
            room = max(layer.keys.shape[2], theirs.keys.shape[2])
            layer.keys = torch.cat([_roomy(layer.keys, room), _roomy(theirs.keys, room)])
            layer.values = torch.cat([_roomy(layer.values, room), _roomy(theirs.values, room)])
        for number, kept in self._states.items():
            self._states[number] = [torch.cat(both) for both in zip(kept, other._states[number])]

    # ---- layers without attention ------------------------------------------------------------------------------------

    def keep_states(self, number: int, *of_prompts: Tensor) -> None:
        """What layer `number` needs to go on behind each prompt, [P, ...] each."""
        self._states[number] = list(of_prompts)

    def states(self, number: int) -> list[Tensor]:
        """The same of each row, [B, ...] each; the layer puts into the list what it needs for the next token."""
        return self._states[number]

    # ---- attention --------------------------------------------------------------------------------------------------

    def keep_prompts(self, number: int, key_RKD: Tensor, value_RKU: Tensor) -> None:
        """Of layer `number`, from a packed row of the prompts."""
        pieces = ((t[: sum(self.prompts)].transpose(0, 1).split(self.prompts, 1)) for t in (key_RKD, value_RKU))
        self._layers[number] = _Layer([(key.contiguous(), value.contiguous()) for key, value in zip(*pieces)])

    def attend(
        self,
        number: int,
        query_BHD: Tensor,
        key_BKD: Tensor,
        value_BKU: Tensor,
        scale: float,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention of the newest token of every row, whose key and value are kept, [B, H, U].

        scale, window, sinks_H: see `attention.Heads`."""
        layer, dtype = self._layers[number], torch.promote_types(query_BHD.dtype, torch.float32)
        if layer.keys.shape[2] <= self._most:
            layer.keys, layer.values = (_roomy(t, self._most + GROWTH) for t in (layer.keys, layer.values))
        rows = torch.arange(len(query_BHD), device=query_BHD.device)
        layer.keys[rows, :, self._behind_B], layer.values[rows, :, self._behind_B] = key_BKD, value_BKU
        query_BKFD = query_BHD.to(dtype).mul(scale).unflatten(1, (key_BKD.shape[1], -1))
        key_BKTD, value_BKTU = (t[:, :, : self._most + 1].to(dtype) for t in (layer.keys, layer.values))
        scores_BKFT = query_BKFD @ key_BKTD.transpose(2, 3)
        if min(self.behind) < self._most or window is not None:
            before_BT = self._behind_B[:, None] - torch.arange(self._most + 1, device=rows.device)
            hidden_BT = before_BT < 0 if window is None else (before_BT < 0) | (before_BT >= window)
            scores_BKFT = scores_BKFT.masked_fill(hidden_BT[:, None, None], -torch.inf)
        seen = _PartialAttention.of(scores_BKFT, value_BKTU)
        of_prompts = _PartialAttention.of_no_keys(seen)
        for prompt, rows_M in self._rows_of_prompts(window):
            key_KPD, value_KPU = (t.to(dtype) for t in layer.prompts[prompt])
            of_prompts.put(rows_M, self._prompt(query_BKFD[rows_M], key_KPD, value_KPU, window, self._behind_B[rows_M]))
        seen = seen.merged(of_prompts)
        if sinks_H is not None:  # one more logit of each head, whose value is zero
            sinks_KF1 = sinks_H.to(dtype).unflatten(0, query_BKFD.shape[1:3])[..., None]
            seen = seen.merged(_PartialAttention(sinks_KF1, torch.ones_like(sinks_KF1), torch.zeros_like(sinks_KF1)))
        return (seen.values / seen.total).flatten(1, 2).to(query_BHD.dtype)

    def _rows_of_prompts(self, window: int | None) -> Iterator[tuple[int, slice | list[int]]]:
        """Each prompt, and its rows that see some of it."""
        rows: dict[int, list[int]] = {}
        for row, prompt in enumerate(self.prompt_of):
            if window is None or self.behind[row] + 1 < window:
                rows.setdefault(prompt, []).append(row)
        for prompt, of_prompt in rows.items():
            first, last = of_prompt[0], of_prompt[-1]
            yield prompt, slice(first, last + 1) if last - first + 1 == len(of_prompt) else of_prompt

    @staticmethod
    def _prompt(
        query_MKFD: Tensor, key_KPD: Tensor, value_KPU: Tensor, window: int | None, behind_M: Tensor
    ) -> "_PartialAttention":
        """What rows see of their prompt, [K, M * F, ...]."""
        heads = query_MKFD.shape[2]
        first = 0
        if window is not None:  # tokens that none of them sees are left out
            first = max(0, key_KPD.shape[1] + int(behind_M.min()) - window + 1)
        key_KPD, value_KPU = key_KPD[:, first:], value_KPU[:, first:]
        query_KND = query_MKFD.transpose(0, 1).flatten(1, 2)
        scores_KNP = query_KND @ key_KPD.transpose(1, 2)
        if window is not None:
            count = key_KPD.shape[1]
            before_MP = count + behind_M[:, None] - torch.arange(count, device=behind_M.device)
            scores_KNP = scores_KNP.masked_fill((before_MP >= window).repeat_interleave(heads, 0), -torch.inf)
        return _PartialAttention.of(scores_KNP, value_KPU)


def _roomy(x_BKTx: Tensor, room: int) -> Tensor:
    """With room for that many tokens."""
    return pad(x_BKTx, (0, 0, 0, max(0, room - x_BKTx.shape[2])))
