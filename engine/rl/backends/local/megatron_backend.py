"""The rollout backend of the trainer's own model: no second copy of the weights, no transfer of them, and the kernels
of training, so that the model that generates and the one that trains differ by rounding alone.

Rows stand one behind the other, one token each, as documents do in training: nothing is padded. Shape suffixes: B rows,
V the vocabulary, R tokens of the packed row.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from isoloss.engine.batching.sample import UNKNOWN
from isoloss.engine.rl.backends.local.base import LocalBackend
from isoloss.engine.rl.backends.local.continuous_batching import ActiveSequence, Decoder
from isoloss.engine.rl.backends.protocol import Bucket, Receives
from isoloss.engine.rl.routes import RoutesForm
from isoloss.engine.rl.trajectory import Sampling
from isoloss.engine.run.folder import tokenizer_folder
from isoloss.engine.step.engine import Engine
from isoloss.models.mcore import patches
from isoloss.models.mcore.gpt import forward_row
from isoloss.models.mcore.moe.experts import RoutedRow
from isoloss.models.model import Model
from isoloss.parallel.ops.kv_cache import KeyValueCache
from isoloss.parallel.ops.prepacked import PackedMatrix
from isoloss.parallel.runtime.upload import upload
from isoloss.parallel.schedule import through_stages


class PackedProducts:
    """Matrices of a model that generates on a CPU, laid out for products of few rows.

    They take the memory of the weights once more. Those of experts are left out.

    head: the output matrix, on the last stage.
    """

    def __init__(self, model: Model, rows: int):
        """rows: number of rows that decode together."""
        self._layers = {
            layer: PackedMatrix(layer.weight, rows)
            for module in model.modules
            for layer in module.decoder.modules()
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.weight is not None
        }
        last = model.modules[-1]
        self.head = PackedMatrix(last.output_weight(), rows) if last.post_process else None

    @staticmethod
    def serve(model: Model) -> bool:
        return PackedMatrix.serves(model.tensors()[0]) and model.mesh.tp.size() == 1

    def in_layers(self) -> AbstractContextManager[None]:
        """Return the context in which the layers multiply by packed weights."""
        return patches.multiply_by(self._layers)


@dataclass
class CachedRows:
    """Rows that decode together, and the keys and values of all their tokens but the newest."""

    rows: list[ActiveSequence]
    cache: KeyValueCache

    def select(self, keep: Sequence[int]) -> "CachedRows":
        self.cache.select(keep)
        return CachedRows([self.rows[k] for k in keep], self.cache)

    def join(self, other: "CachedRows") -> "CachedRows":
        self.cache.join(other.cache)
        return CachedRows([*self.rows, *other.rows], self.cache)


def routes_of(rows: Sequence[ActiveSequence]) -> RoutesForm | None:
    """Return the form of the routes that rows ask for; None where none does."""
    return next((row.sampling.routes for row in rows if row.sampling.routes is not None), None)


class MegatronDecoder(Decoder):
    """By the model's weights as they are when it first decodes.

    Every method is collective over tp x pp, whose ranks pass the same rows, and one for one over the ranks that share
    experts. Logits are on the last stage.
    """

    def __init__(self, model: Model):
        self._model = model
        layout = model.mesh.layout
        self._multiple = layout.tp if layout.sequence_parallel else 1
        self._products: PackedProducts | None = None

    def prefill(self, rows: Sequence[ActiveSequence]) -> tuple[CachedRows, Tensor | None]:
        """See `Decoder`."""
        place: dict[tuple[int, ...], int] = {}
        source = [place.setdefault(row.context, len(place)) for row in rows]
        lengths = [len(context) for context in place]
        cache = KeyValueCache(lengths, self._model.device)
        tokens = [token for context in place for token in context]
        positions = [position for length in lengths for position in range(length)]
        ends = torch.tensor(lengths).cumsum(0) - 1
        logits_BV, routes = self._forward(tokens, positions, lengths, ends, cache, routes_of(rows))
        cache.begin(source)
        if routes is not None:
            of_context = np.split(routes, np.cumsum(lengths)[:-1])
            for row, index in zip(rows, source):
                row.routes += [*of_context[index][len(row.routes) :]]
        if logits_BV is not None:
            logits_BV = logits_BV[torch.tensor(source, device=logits_BV.device)]
        return CachedRows(list(rows), cache), logits_BV

    def decode(self, batch: CachedRows) -> Tensor | None:
        """See `Decoder`."""
        tokens, positions = [row.tokens[-1] for row in batch.rows], [row.length - 1 for row in batch.rows]
        count = len(tokens)
        if self._products is None and PackedProducts.serve(self._model):
            self._products = PackedProducts(self._model, count)
        with self._products.in_layers() if self._products else nullcontext():
            ends, form = torch.arange(count), routes_of(batch.rows)
            logits_BV, routes = self._forward(tokens, positions, [1] * count, ends, batch.cache, form)
        batch.cache.grown()
        if routes is not None:
            for row, of_newest in zip(batch.rows, routes):
                row.routes.append(of_newest)
        return logits_BV

    def idle(self) -> None:
        """See `Decoder`."""
        self._forward([0], [0], [1], torch.zeros(1, dtype=torch.int64), KeyValueCache([1], self._model.device))

    def choose(self, logits_BV: Tensor | None, keys_B: Sequence[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
        """See `Decoder`. One broadcast over pp."""
        pp = self._model.mesh.pp
        if pp.size() == 1:
            return super().choose(logits_BV, keys_B, sampling)
        chosen_2B = torch.empty(2, len(keys_B), dtype=torch.float64, device=self._model.device)
        if logits_BV is not None:
            chosen_2B.copy_(torch.stack([each.double() for each in super().choose(logits_BV, keys_B, sampling)]))
        dist.broadcast(chosen_2B, group=pp, group_src=pp.size() - 1)
        return chosen_2B[0].long(), chosen_2B[1]

    def _forward(
        self,
        tokens: list[int],
        positions: list[int],
        lengths: list[int],
        at: Tensor,
        cache: KeyValueCache,
        routes: RoutesForm | None = None,
    ) -> tuple[Tensor | None, np.ndarray | None]:
        """The logits at these places of a row of documents of these lengths, on the last stage; and where `routes` are
        asked for those of all tokens, on every rank."""
        count, chosen = len(tokens), None if routes is None else dict[int, Tensor]()
        model, device = self._model, self._model.device
        rest = -len(tokens) % self._multiple
        both = upload(torch.tensor([tokens + [0] * rest, positions + list(range(rest))]), device)
        lengths = lengths + [rest] * (rest > 0)

        def forward(chunk: nn.Module) -> Tensor:
            return forward_row(chunk, both[0], both[1], RoutedRow(lengths=tuple(lengths), cache=cache, chosen=chosen))

        hidden = through_stages(model.mesh, model.chunks, both.shape[1] // self._multiple, forward)
        rows = None if routes is None or chosen is None else self._routes(routes, chosen, both.shape[1])[:count]
        if hidden is None:
            return None, rows
        return model.logits(hidden, upload(at, device), self._products.head if self._products else None), rows

    def _routes(self, form: RoutesForm, chosen: Mapping[int, Tensor], tokens: int) -> np.ndarray:
        """Return the routes of a row, [tokens, L, X]. chosen: those of this rank's layers, for its part of the tokens.
        One all-reduce over tp x pp."""
        mesh = self._model.mesh
        routes = torch.full(form.unknown(tokens).shape, UNKNOWN, dtype=torch.int32, device=self._model.device)
        for place, index in enumerate(form.sparse):
            if index + 1 in chosen:
                of_layer = chosen[index + 1].int()
                first = mesh.tp.rank() * len(of_layer) if len(of_layer) < tokens else 0
                routes[first : first + len(of_layer), place] = of_layer
        if mesh.stage.size() > 1:
            dist.all_reduce(routes, dist.ReduceOp.MAX, group=mesh.stage)
        return routes.short().numpy(force=True)


class MegatronBackend(LocalBackend):
    """Generates with the engine's weights as they are. They never travel, and there is no second copy.

    Every rank of dp x context has a model of its own; its tp x pp ranks decode the same rows together. With ep > 1,
    models share experts: they go from token to token together, and one that has no rows left reads a token for the
    others' sake.
    Collective over the world.
    """

    receives: Receives = "every rank"

    def __init__(self, engine: Engine, concurrency: int):
        super().__init__(engine.arch, concurrency, tokenizer_folder(engine.config))
        self._engine, world = engine, dist.group.WORLD
        assert world is not None, "an engine is of a world"
        self._together = engine.mesh.stage if engine.mesh.layout.ep == 1 else world

    def decoder(self) -> MegatronDecoder:
        return MegatronDecoder(self._engine.whole_model())

    def share(self) -> tuple[int, int]:
        replicas = self._engine.mesh.dp_context
        return replicas.rank(), replicas.size()

    def answers(self) -> bool:
        return self._engine.mesh.stage.rank() == 0

    def agree(self, known: int, busy: bool) -> tuple[int, bool]:
        """Implement `LocalBackend.agree`. One all-reduce among the ranks that decode together."""
        if self._together.size() == 1:
            return known, busy
        largest = torch.tensor([known, busy], dtype=torch.int32, device=self._engine.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._together)
        known, busy = largest.tolist()
        return known, bool(busy)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """The weights are those of the engine already: nothing is asked of `buckets`."""
        self._version = version
