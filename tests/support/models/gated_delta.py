"""The gated delta rule token by token, and a layer of Gated DeltaNet on a grid of ranks."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.models.mcore.activation_memory import ActivationMemory
from isoloss.models.mcore.build import layer_spec, transformer_config
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.layers.gated_delta_net import GatedDeltaNet
from isoloss.parallel import Layout, Mesh
from isoloss.parallel.attention import PackedRow
from isoloss.parallel.head_exchange import HeadExchange
from isoloss.parallel.sequence import own_tokens
from support.models.decoders import decoder, with_attentions

Weights = dict[str, Tensor]
STORED = ActivationMemory()


def token_by_token(query_TKD, key_TKD, value_THU, log_decay_TH, rate_TH, lengths) -> Tensor:
    """The recurrence that defines the rule (arXiv:2412.06464, equation 10), one document after the other."""
    group = value_THU.shape[1] // key_TKD.shape[1]
    query, key = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)
                  for t in (query_TKD, key_TKD))  # fmt: skip
    outs = []
    for document in zip(*(t.split(lengths) for t in (query, key, value_THU, log_decay_TH, rate_TH))):
        state = value_THU.new_zeros(value_THU.shape[1], key.shape[2], value_THU.shape[2])
        for q, k, v, log_decay, rate in zip(*document):
            state = state * log_decay.exp()[:, None, None]
            read = torch.einsum("hd,hdu->hu", k, state)
            state = state + torch.einsum("hd,hu->hdu", k, rate[:, None] * (v - read))
            outs.append(torch.einsum("hd,hdu->hu", q, state) * q.shape[-1] ** -0.5)
    return torch.stack(outs)


def architecture(key_heads: int = 4, value_heads: int = 8) -> Architecture:
    """Sizes that all differ."""
    delta = GatedDelta(key_heads=key_heads, value_heads=value_heads, key_dim=6, value_dim=5, conv_width=4)
    return with_attentions(decoder(1, 26, (8, 8, 4), 16, 64), [delta])


def delta_of(arch: Architecture) -> GatedDelta:
    (kind,) = arch.attentions
    assert isinstance(kind, GatedDelta)
    return kind


@dataclass(frozen=True)
class Case:
    """A layer, a row, and the gradient of its output. recompute: the core again in the backward."""

    arch: Architecture
    weights: Weights  # of the whole layer, the sections of in_proj and conv1d each for itself
    hidden: Tensor
    grad: Tensor
    lengths: tuple[int, ...]
    recompute: bool = False


def random_case(lengths: tuple[int, ...], arch: Architecture, seed: int, **more) -> Case:
    """Slow decays, so that what leaks over a border is not gone after a few tokens."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    d = delta_of(arch)
    keys, values, hidden = d.key_heads * d.key_dim, d.value_heads * d.value_dim, arch.hidden_size
    rows = {"query": keys, "key": keys, "value": values, "z": values, "beta": d.value_heads, "alpha": d.value_heads}
    weights = {f"in_proj.weight.{name}": normal(count, hidden) / hidden**0.5 for name, count in rows.items()}
    weights |= {f"conv1d.weight.{name}": normal(rows[name], 1, d.conv_width) for name in ("query", "key", "value")}
    weights |= {"A_log": torch.logspace(-2.3, 1.2, d.value_heads, dtype=torch.float64).log(),
                "dt_bias": normal(d.value_heads), "out_norm.weight": normal(d.value_dim) + 1,
                "out_proj.weight": normal(hidden, values) / values**0.5}  # fmt: skip
    tokens = sum(lengths)
    return Case(arch, weights, normal(tokens, hidden), normal(tokens, hidden), lengths, **more)


def _own(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """What a TP rank has of a weight of the whole layer."""
    if name == "out_norm.weight":
        return whole
    return whole.chunk(ranks, 1 if name == "out_proj.weight" else 0)[rank]


def _cut(name: str, held: Tensor, arch: Architecture, ranks: int) -> Weights:
    """A parameter of a TP rank by its sections."""
    if name not in ("in_proj.weight", "conv1d.weight"):
        return {name: held}
    d = delta_of(arch)
    keys, values = d.key_heads * d.key_dim // ranks, d.value_heads * d.value_dim // ranks
    heads = d.value_heads // ranks
    sections = ("query", "key", "value", "z", "beta", "alpha")[: 3 if name == "conv1d.weight" else 6]
    sizes = [keys, keys, values, values, heads, heads][: len(sections)]
    return {f"{name}.{key}": part for key, part in zip(sections, held.split(sizes), strict=True)}


def build(arch: Architecture, mesh: Mesh, dtype=torch.float64, memory: ActivationMemory = STORED) -> GatedDeltaNet:
    """The layer that `layer_spec` puts into the slot of attention."""
    options = BuildOptions(memory)
    config = transformer_config(arch, mesh.layout, dtype, (1,), options)
    submodules: Any = layer_spec(arch.layers[0], mesh, options).submodules
    spec = submodules.self_attention
    layer = spec.module(config, layer_number=1, pg_collection=mesh.megatron, **spec.params)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    return layer


@torch.no_grad()
def load(layer: GatedDeltaNet, case: Case, mesh: Mesh) -> None:
    rank, ranks = mesh.tp.rank(), mesh.tp.size()
    for name, parameter in layer.named_parameters():
        for section, part in _cut(name, parameter, case.arch, ranks).items():
            part.copy_(_own(section, case.weights[section], rank, ranks))


def on_slices(case: Case, layout: Layout) -> tuple[Tensor, int, Tensor, Tensor, Weights]:
    """Of this rank: its tokens, its TP rank, output and gradient of the hidden states at them, gradients of its part of
    the weights. Under sequence parallelism TP ranks have their own tokens."""
    mesh = Mesh.create(layout)
    memory = ActivationMemory("selective", ("core_attn",)) if case.recompute else STORED
    layer = build(case.arch, mesh, memory=memory)
    load(layer, case, mesh)
    tokens = own_tokens(case.lengths, mesh)
    if layout.sequence_parallel:
        tokens = tokens.chunk(mesh.tp.size())[mesh.tp.rank()]
    hidden = case.hidden[tokens][:, None].clone().requires_grad_()
    row = PackedRow(lengths=case.lengths)
    for _ in range(2):  # as two micro-batches: what is summed is summed once each
        out, bias = layer(hidden, None, rotary_pos_emb=None, packed_seq_params=row)
        assert bias is None
        (out[:, 0] * case.grad[tokens] / 2).sum().backward()
    assert hidden.grad is not None
    grads: Weights = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        grads |= _cut(name, parameter.grad, case.arch, mesh.tp.size())
    return tokens, mesh.tp.rank(), out[:, 0].detach(), hidden.grad[:, 0], grads


def whole_of(results: list, layout: Layout) -> tuple[Tensor, Tensor, Weights]:
    """Output, gradient of the hidden states and of the weights, put together from what the ranks have."""
    shards = results if layout.sequence_parallel else [each for each in results if each[1] == 0]
    tokens = torch.cat([each[0] for each in shards])
    assert tokens.sort().values.tolist() == list(range(len(tokens)))
    out, grad = (torch.cat([each[place] for each in shards])[tokens.argsort()] for place in (2, 3))
    grads: Weights = {}
    for name in results[0][4]:
        of_tp = [
            torch.stack([each[4][name] for each in results if each[1] == rank]).sum(0) for rank in range(layout.tp)
        ]
        if name == "out_norm.weight":
            for other in of_tp[1:]:
                torch.testing.assert_close(other, of_tp[0], rtol=1e-12, atol=1e-12)
            grads[name] = of_tp[0]
        else:
            grads[name] = torch.cat(of_tp, 1 if name == "out_proj.weight" else 0)
    return out, grad, grads


def exchanged(lengths: tuple[int, ...], layout: Layout, widths: tuple[int, ...]) -> tuple[Tensor, bool, list[int]]:
    """What a rank gets of parts with these channels a token, which number row and channel; whether the way back leads
    to what it had; and the bytes that it sends to others in each all-to-all: forth, back, and their gradients."""
    mesh = Mesh.create(layout)
    exchange, row, sent = HeadExchange.over(mesh), PackedRow(lengths=lengths), []
    tokens, first = own_tokens(lengths, mesh), 0
    parts = []
    for width in widths:
        parts.append((tokens[:, None] * 1000 + first + torch.arange(width)).double().requires_grad_())
        first += width
    send = dist.all_to_all_single

    def counted(out, given, *more, group, **also):
        sent.append(given.nbytes * (group.size() - 1) // group.size())
        return send(out, given, *more, group=group, **also)

    with mock.patch.object(dist, "all_to_all_single", counted):
        whole = exchange.to_heads(parts, row)
        last = whole[:, -(widths[-1] // exchange.ranks) :]
        back = exchange.to_tokens(last, row)
        (back * parts[-1].detach()).sum().backward()
    same = back.equal(parts[-1]) and bool(parts[-1].grad is not None and parts[-1].grad.equal(parts[-1]))
    return whole.detach(), same, sent
