"""When Transformer Engine is used, what it is refused for, and how its attention wants rows. Nothing of it runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from support.faults.refusals import first_refusal, rule_places, silent
from support.models.decoders import attending, decoder, sparse, with_attentions, with_windows

from isoloss.engine.batching.packing import StepSamples, pack
from isoloss.engine.batching.sample import Sample
from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.latent import Latent
from isoloss.models.mcore import transformer_engine
from isoloss.models.rope import Rope
from isoloss.models.weights.checkpoint_names import checkpoint_rows, local_name, native_style
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import Layout, Mesh, UserError
from isoloss.parallel.ops.prefix_tree import PrefixTree

DENSE = decoder(4, 64, (8, 4, 8), 72, 100)
SPARSE = sparse(DENSE, 6, 2, 28, "softmax", True)
BIASED = attending(sparse(DENSE, 6, 2, 28, "softmax", True, bias=True), output_bias=True)
WINDOWED = with_windows(DENSE, 9, None)


def latent(q_rank: int | None) -> Architecture:
    rope = Rope(1e4, interleaved=True)
    kind = Latent(heads=8, q_rank=q_rank, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=16, rope=rope)
    return with_attentions(DENSE, [kind])


def asymmetric(**changes) -> Architecture:
    own = {"heads": 8, "kv_heads": 4, "head_dim": 8, "rope": Rope(1e4), "rotary_dim": 8, "value_dim": 6}
    return with_attentions(DENSE, [Asymmetric(**{**own, **changes})])


def here(monkeypatch, version: str | None, gpu: bool = True) -> None:
    monkeypatch.setattr(transformer_engine, "installed", lambda: Version(version) if version else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)


def test_it_is_off_until_asked_for():
    assert ModelConfig("anywhere") == ModelConfig("anywhere", transformer_engine=False)


def config(precision: str, wanted: bool, **parallel) -> Config:
    return Config(
        ModelConfig("anywhere", transformer_engine=wanted),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(precision=precision),
    )


def check(settings: Config, arch: Architecture) -> None:
    rules.check(settings, arch, settings.parallel.layout())


@pytest.mark.parametrize(
    ("version", "arch", "settings"),
    [
        (None, DENSE, config("bf16", False)),
        ("2.8", DENSE, config("bf16", False)),
        ("2.11", DENSE, config("fp64", False)),
        ("2.11", attending(BIASED, sinks="sinks"), config("fp32", True)),
        ("2.11", WINDOWED, config("bf16", True, cp_kernel="p2p")),
        ("2.11", DENSE, config("bf16", True, cp_kernel="p2p", ring=8, tp=2)),
        ("2.11", WINDOWED, config("bf16", True, cp_kernel="a2a", ulysses=4)),
        ("2.18", WINDOWED, config("bf16", True, cp_kernel="all_gather", ring=4)),
        ("2.19", DENSE, config("bf16", True, cp_kernel="a2a+p2p", ulysses=2, ring=3, tp=2)),
        ("2.9", DENSE, config("bf16", True, cp_kernel="a2a+p2p")),  # one context rank: nothing to split
    ],
)
def test_admits(version, arch, settings, monkeypatch):
    here(monkeypatch, version)
    check(settings, arch)


REFUSED = [
    (None, DENSE, config("bf16", True), "model.transformer_engine=true needs the package transformer_engine"),
    ("2.8", DENSE, config("bf16", True), "model.transformer_engine=true needs Transformer Engine 2.9, and here is 2.8"),
    ("2.11", DENSE, config("fp64", True), "model.transformer_engine=true does not work with train.precision=fp64"),
    (None, DENSE, config("bf16", False, cp_kernel="p2p"), "parallel.cp_kernel=p2p is a kernel of Transformer Engine"),
    ("2.11", DENSE, config("bf16", False, cp_kernel="p2p"), "parallel.cp_kernel=p2p is a kernel of Transformer Engine"),
    ("2.11", DENSE, config("fp32", True, cp_kernel="p2p"), "cp_kernel=p2p does not work with train.precision=fp32"),
    (
        "2.9", DENSE, config("bf16", True, cp_kernel="a2a", ulysses=2),
        "cp_kernel=a2a splits packed rows from Transformer Engine 2.10 on, and here is 2.9; use p2p or isoloss",
    ),
    (
        "2.11", DENSE, config("bf16", True, cp_kernel="all_gather", ring=2),
        "all_gather splits packed rows from Transformer Engine 2.18 on, and here is 2.11; use p2p, a2a or isoloss",
    ),
    ("2.18", DENSE, config("bf16", True, cp_kernel="a2a+p2p", ring=2), "Transformer Engine 2.19 on, and here is 2.18"),
    (
        "2.11", latent(None), config("bf16", True, cp_kernel="p2p"),
        "cp_kernel=p2p does not attend for latent attention here; use parallel.cp_kernel=isoloss",
    ),
    (
        "2.11", asymmetric(value_scale=0.7), config("bf16", True, cp_kernel="p2p"),
        "cp_kernel=p2p does not attend for llama attention here; use parallel.cp_kernel=isoloss",
    ),
    ("2.11", attending(DENSE, sinks="sinks"), config("bf16", True, cp_kernel="p2p"), "p2p has no attention sinks"),
    ("2.11", attending(DENSE, head_dim=20), config("bf16", True, cp_kernel="p2p"), "and the model's have 20"),
    (
        "2.11", WINDOWED, config("bf16", True, cp_kernel="p2p", ring=2),
        "cp_kernel=p2p has no attention windows; use parallel.cp_kernel=a2a, all_gather or isoloss",
    ),
    (
        "2.11", DENSE, config("bf16", True, cp_kernel="p2p", ulysses=2, ring=2),
        "parallel.ulysses=2 divides heads, and parallel.cp_kernel=p2p .* set it to 1, and parallel.ring to 4",
    ),
    (
        "2.11", DENSE, config("bf16", True, cp_kernel="a2a", ulysses=2, ring=2),
        "parallel.ring=2 passes keys and values round, .*; set it to 1, and parallel.ulysses to 4",
    ),
    (
        "2.11", DENSE, config("bf16", True, cp_kernel="a2a", ulysses=4, tp=2),
        "parallel.ulysses=4 does not divide the 2 key/value heads of a TP rank, which parallel.cp_kernel=a2a",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("version", "arch", "settings", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refuses_by_name(version, arch, settings, message, monkeypatch):
    here(monkeypatch, version)
    with pytest.raises(UserError, match=message) as refusal:
        check(settings, arch)
    assert "\n" not in str(refusal.value)


def test_every_rule_speaks(monkeypatch):
    refusals = []
    for version, arch, settings, _ in REFUSED:
        here(monkeypatch, version)
        refusals.append(first_refusal(settings, arch, settings.parallel.layout()))
    about = ("transformer_engine", "fused_kernel_refusals")
    places = [place for name, places in rule_places().items() if name.startswith(about) for place in places]
    assert len(places) == 14 and silent(places, refusals) == []


@pytest.mark.parametrize("arch", [DENSE, BIASED, latent(5)])
def test_names_of_fused_modules_are_those_of_a_checkpoint(arch):
    """A checkpoint's keys are what Transformer Engine's modules are called, but for the experts, which it stacks."""
    style = native_style(arch)
    for weight in weight_map(arch):
        if weight.layer is None:
            continue
        (place,) = checkpoint_rows(weight, arch, style)
        name = place.key.removeprefix("decoder.layers.")
        if weight.expert is not None:
            name = name.replace("experts.experts.", "experts.") + str(weight.expert)
        wanted = weight.name.removeprefix(f"decoder.layers.{weight.layer}.")
        assert local_name(name, arch.layers[weight.layer]) == wanted
        assert local_name(wanted, arch.layers[weight.layer]) == wanted


def fake_mesh(context: int, rank: int, tp: int = 1) -> Any:
    group: Any = SimpleNamespace(size=lambda: context, rank=lambda: rank)
    layout = Layout(tp=tp, ring=context, sequence_parallel=tp > 1)
    return Mesh(layout, *[group] * 12, cp_kernel="p2p")


@pytest.mark.parametrize(
    ("lengths", "context", "tp"), [([5, 1, 9], 2, 1), ([8, 16], 2, 2), ([3], 4, 8), ([7, 2], 1, 1)]
)
def test_rows_are_dealt_as_transformer_engine_wants_them(lengths, context, tp):
    """Each document is padded to 2P chunks of one size; rank r has chunks r and 2P - 1 - r of each, in that order."""
    samples, start = [], 1
    for length in lengths:
        samples.append(Sample(torch.arange(start, start + length), torch.arange(length) > 0))
        start += length
    weights = {i: torch.ones((1, length), dtype=torch.float64) for i, length in enumerate(lengths)}
    step, tree = StepSamples(samples, weights, 1, range(len(samples))), PrefixTree.apart(lengths)
    rows = [
        pack(step, range(len(samples)), tree, fake_mesh(context, rank, tp), torch.device("cpu"))
        for rank in range(context)
    ]
    multiple = 2 * context if context > 1 else 1
    expected: list[list[int]] = [[] for _ in range(context)]
    for sample in samples:
        padded = sample.tokens_T.tolist()
        padded += [0] * (-len(padded) % multiple)
        size = len(padded) // (2 * context)
        for rank, tokens in enumerate(expected):
            for chunk in (rank, 2 * context - 1 - rank) if context > 1 else ():
                tokens += padded[chunk * size : (chunk + 1) * size]
            tokens += padded if context == 1 else []
    for row, tokens in zip(rows, expected):
        assert len(row.tokens_R) * context == sum(row.lengths) and len(row.tokens_R) % tp == 0
        assert all(length % multiple == 0 for length in row.lengths)
        assert row.length_S.tolist() == lengths and len(row.parents) == len(row.lengths)
        assert row.tokens_R[: len(tokens)].tolist() == tokens and not row.tokens_R[len(tokens) :].any()
        padding = row.tokens_R == 0
        assert (row.piece_R == -1).equal(padding)
        document, targets = row.piece_R[row.labelled_N], row.targets_N
        assert document.equal(row.document_N)
        assert targets.equal(row.tokens_R[row.labelled_N] + 1) and not padding[row.labelled_N].any()
        assert row.positions_R[row.labelled_N].equal(row.origin_N - 1 - torch.tensor(step.starts)[document])
    assert sum(len(row.labelled_N) for row in rows) == sum(lengths) - len(lengths)
