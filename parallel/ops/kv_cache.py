"""A cache of keys and values for decoding by a token at a time, and of the states of layers without attention.

Rows that continue the same prompt read one copy of its keys and values. Attention to the prompt and attention to the
tokens after the prompt are merged as sums, and divided by the common total in the end.

Shape suffixes: B rows, M rows of one prompt, P tokens of a prompt, T tokens of the longest row after its prompt, H
query heads, K key/value heads, F query heads of each key/value head, D width of a query or a key, U width of a value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoloss.parallel.ops.block_attention import Heads
from isoloss.parallel.runtime.upload import upload

GROWTH = 64  # tokens by which the room of a row grows


@dataclass
class _PartialAttention:
    """Attention to some of the keys as sums that are not divided yet, so that sums over other keys can be added.

    top: largest score, [..., 1].
    total: sum of exp(score - top), [..., 1].
    values: sum of exp(score - top) * value, [..., U].
    """

    top: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> "_PartialAttention":
        """Sum over scores [..., T] and values [..., T, U]. Overwrites the scores."""
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        return cls(top, weights.sum(-1, keepdim=True), weights @ values)

    @classmethod
    def of_no_keys(cls, like: "_PartialAttention") -> "_PartialAttention":
        return cls(torch.full_like(like.top, -torch.inf), torch.zeros_like(like.total), torch.zeros_like(like.values))

    def put(self, rows: slice | list[int], seen: "_PartialAttention") -> None:
        """Write the sums `seen`, [K, M * F, ...], into these M rows of [B, K, F, ...]."""
        for all_rows, some_rows in ((self.top, seen.top), (self.total, seen.total), (self.values, seen.values)):
            all_rows[rows] = some_rows.unflatten(1, (-1, all_rows.shape[2])).transpose(0, 1)

    def merged(self, other: "_PartialAttention") -> "_PartialAttention":
        """Return the sums over the keys of both."""
        top = torch.maximum(self.top, other.top)
        share, other_share = (self.top - top).exp_(), (other.top - top).exp_()
        total = self.total * share + other.total * other_share
        return _PartialAttention(top, total, self.values * share + other.values * other_share)


class _Layer:
    """Keys and values of one layer.

    prompts: keys [K, P, D] and values [K, P, U] of each prompt.
    keys, values: [B, K, room, D] and [B, K, room, U] of the tokens after the prompt of each row.
    """

    def __init__(self, prompts: list[tuple[Tensor, Tensor]]):
        self.prompts = prompts
        key_KPD, value_KPU = prompts[0]
        self.keys, self.values = (t.new_zeros((0, len(t), 0, t.shape[2])) for t in (key_KPD, value_KPU))


class KeyValueCache:
    """Keys, values and states that the layers of a model keep for the rows that the model decodes.

    prompts: tokens of each prompt.
    prompt_of: index of each row's prompt.
    behind: cached tokens of each row after its prompt.
    """

    def __init__(self, prompts: Sequence[int], device: torch.device):
        self.prompts, self.prompt_of, self.behind = list(prompts), list[int](), list[int]()
        self._device, self._behind_B = device, torch.zeros(0, dtype=torch.int64, device=device)
        self._layers: dict[int, _Layer] = {}
        self._states: dict[int, list[Tensor]] = {}  # by layer without attention, [B, ...] each

    @property
    def _longest(self) -> int:
        return max(self.behind, default=0)

    @property
    def reads_prompts(self) -> bool:
        """Return True until `begin`, while the layers read the prompts and no row exists."""
        return not self.prompt_of

    # ---- rows --------------------------------------------------------------------------------------------------------

    def begin(self, prompt_of: Sequence[int]) -> None:
        """Start a row for each entry of `prompt_of`, an index of a prompt, after all layers have read the prompts."""
        self.prompt_of, self.behind = list(prompt_of), [0] * len(prompt_of)
        self._upload()
        for layer in self._layers.values():
            layer.keys, layer.values = (t.new_zeros((len(prompt_of), *t.shape[1:])) for t in (layer.keys, layer.values))
        self._take_states(prompt_of)

    def grown(self) -> None:
        """Count the newest token of every row, after every layer has attended from it."""
        self.behind = [count + 1 for count in self.behind]
        self._upload()

    def _upload(self) -> None:
        self._behind_B = upload(torch.tensor(self.behind, dtype=torch.int64), self._device)

    def select(self, keep: Sequence[int]) -> None:
        """Keep only these rows, and only prompts that some kept row continues."""
        used = list(dict.fromkeys(self.prompt_of[k] for k in keep))
        self.prompt_of = [used.index(self.prompt_of[k]) for k in keep]
        self.prompts = [self.prompts[p] for p in used]
        self.behind = [self.behind[k] for k in keep]
        self._upload()
        rows = torch.tensor(keep, dtype=torch.int64, device=self._device)
        for layer in self._layers.values():
            layer.prompts = [layer.prompts[p] for p in used]
            layer.keys, layer.values = (t[rows, :, : self._longest] for t in (layer.keys, layer.values))
        self._take_states(keep)

    def _take_states(self, indices: Sequence[int]) -> None:
        rows = torch.tensor(indices, dtype=torch.int64, device=self._device)
        self._states = {number: [t[rows] for t in states] for number, states in self._states.items()}

    def join(self, other: "KeyValueCache") -> None:
        """Append the rows and prompts of `other`."""
        self.prompt_of += [len(self.prompts) + prompt for prompt in other.prompt_of]
        self.prompts += other.prompts
        self.behind += other.behind
        self._upload()
        for number, layer in self._layers.items():
            added = other._layers[number]
            layer.prompts += added.prompts
            room = max(layer.keys.shape[2], added.keys.shape[2])
            layer.keys = torch.cat([_padded(layer.keys, room), _padded(added.keys, room)])
            layer.values = torch.cat([_padded(layer.values, room), _padded(added.values, room)])
        for number, states in self._states.items():
            self._states[number] = [torch.cat(both) for both in zip(states, other._states[number])]

    # ---- layers without attention ------------------------------------------------------------------------------------

    def keep_states(self, number: int, *states: Tensor) -> None:
        """Keep the states of layer `number` after each prompt, [prompts, ...] each."""
        self._states[number] = list(states)

    def states(self, number: int) -> list[Tensor]:
        """Return the states of layer `number` for each row, [B, ...] each, a list that the layer updates in place."""
        return self._states[number]

    # ---- attention --------------------------------------------------------------------------------------------------

    def keep_prompts(self, number: int, key_RKD: Tensor, value_RKU: Tensor) -> None:
        """Keep the keys and values of layer `number` from a packed row of the prompts, padding excluded."""
        pieces = ((t[: sum(self.prompts)].transpose(0, 1).split(self.prompts, 1)) for t in (key_RKD, value_RKU))
        self._layers[number] = _Layer([(key.contiguous(), value.contiguous()) for key, value in zip(*pieces)])

    def attend(
        self,
        number: int,
        query_BHD: Tensor,
        key_BKD: Tensor,
        value_BKU: Tensor,
        heads: Heads,
    ) -> Tensor:
        """Compute the attention of the newest token of every row, [B, H, U], and keep the key and value of the token.

        number: the layer. heads: options, of which `flash` is ignored.
        """
        window, sinks_H = heads.window, heads.sinks_H
        layer, dtype = self._layers[number], torch.promote_types(query_BHD.dtype, torch.float32)
        if layer.keys.shape[2] <= self._longest:
            layer.keys, layer.values = (_padded(t, self._longest + GROWTH) for t in (layer.keys, layer.values))
        rows = torch.arange(len(query_BHD), device=query_BHD.device)
        layer.keys[rows, :, self._behind_B], layer.values[rows, :, self._behind_B] = key_BKD, value_BKU
        query_BKFD = query_BHD.to(dtype).mul(heads.scale).unflatten(1, (key_BKD.shape[1], -1))
        key_BKTD, value_BKTU = (t[:, :, : self._longest + 1].to(dtype) for t in (layer.keys, layer.values))
        scores_BKFT = query_BKFD @ key_BKTD.transpose(2, 3)
        if min(self.behind) < self._longest or window is not None:
            before_BT = self._behind_B[:, None] - torch.arange(self._longest + 1, device=rows.device)
            hidden_BT = before_BT < 0 if window is None else (before_BT < 0) | (before_BT >= window)
            scores_BKFT = scores_BKFT.masked_fill(hidden_BT[:, None, None], -torch.inf)
        seen = _PartialAttention.of(scores_BKFT, value_BKTU)
        seen_prompts = _PartialAttention.of_no_keys(seen)
        for prompt, rows_M in self._rows_of_prompts(window):
            key_KPD, value_KPU = (t.to(dtype) for t in layer.prompts[prompt])
            behind_M = self._behind_B[rows_M]
            seen_prompts.put(rows_M, self._prompt(query_BKFD[rows_M], key_KPD, value_KPU, window, behind_M))
        seen = seen.merged(seen_prompts)
        if sinks_H is not None:  # a sink is one more logit of its head, with a value of zero
            sinks_KF1 = sinks_H.to(dtype).unflatten(0, query_BKFD.shape[1:3])[..., None]
            seen = seen.merged(_PartialAttention(sinks_KF1, torch.ones_like(sinks_KF1), torch.zeros_like(sinks_KF1)))
        return (seen.values / seen.total).flatten(1, 2).to(query_BHD.dtype)

    def _rows_of_prompts(self, window: int | None) -> Iterator[tuple[int, slice | list[int]]]:
        """Yield each prompt and its rows that see some token of the prompt, as a slice if the rows are adjacent."""
        rows_by_prompt: dict[int, list[int]] = {}
        for row, prompt in enumerate(self.prompt_of):
            if window is None or self.behind[row] + 1 < window:
                rows_by_prompt.setdefault(prompt, []).append(row)
        for prompt, rows in rows_by_prompt.items():
            first, last = rows[0], rows[-1]
            yield prompt, slice(first, last + 1) if last - first + 1 == len(rows) else rows

    @staticmethod
    def _prompt(
        query_MKFD: Tensor, key_KPD: Tensor, value_KPU: Tensor, window: int | None, behind_M: Tensor
    ) -> "_PartialAttention":
        """Compute the attention of rows to their common prompt, [K, M * F, ...]."""
        heads = query_MKFD.shape[2]
        first = 0
        if window is not None:  # skip tokens that no row sees
            first = max(0, key_KPD.shape[1] + int(behind_M.min()) - window + 1)
        key_KPD, value_KPU = key_KPD[:, first:], value_KPU[:, first:]
        query_KND = query_MKFD.transpose(0, 1).flatten(1, 2)
        scores_KNP = query_KND @ key_KPD.transpose(1, 2)
        if window is not None:
            count = key_KPD.shape[1]
            before_MP = count + behind_M[:, None] - torch.arange(count, device=behind_M.device)
            scores_KNP = scores_KNP.masked_fill((before_MP >= window).repeat_interleave(heads, 0), -torch.inf)
        return _PartialAttention.of(scores_KNP, value_KPU)


def _padded(x_BKTx: Tensor, room: int) -> Tensor:
    """Pad with zeros to room for `room` tokens; larger tensors stay as they are."""
    return pad(x_BKTx, (0, 0, 0, max(0, room - x_BKTx.shape[2])))
