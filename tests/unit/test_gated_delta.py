"""The gated delta rule and its convolution over packed rows: against the recurrence, against transformers, document by
document, and in bf16 against fp64."""

import importlib
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.gated_delta import architecture, build, delta_of, load, random_case, token_by_token
from torch import Tensor
from torch.nn.functional import conv1d, silu

import isoloss.parallel.ops.gated_delta
from isoloss.parallel import Layout, Mesh
from isoloss.parallel.attention import PackedRow
from isoloss.parallel.ops.gated_delta import DeltaInputs, delta_rule_and_states, delta_rule_next
from isoloss.parallel.ops.gated_delta import delta_rule as delta_rule_of_inputs
from isoloss.parallel.ops.gated_delta_chunks import CHUNK, chunks_of
from isoloss.parallel.ops.short_convolution import convolution_next, last_tokens, short_convolution

TRANSFORMERS = "transformers.models.qwen3_5.modeling_qwen3_5"
ROWS = [(97,), (64,), (1,), (2, 3, 1, 1), (37, 1, 51, 3, 140, 8, 2, 66), (64, 128, 65, 1, 63, 192)]
# A head that forgets 0.1 % of its state a token: what leaks over a border is seen in all of the next document.
SPEEDS = torch.tensor([0.005, 0.05, 1.0, 16.0], dtype=torch.float64)


def delta_rule(*tensors_and_lengths) -> Tensor:
    *tensors, lengths = tensors_and_lengths
    return delta_rule_of_inputs(DeltaInputs(*tensors), lengths)


def inputs(lengths, key_heads: int = 2, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, log decays and rates."""
    random, tokens = torch.Generator().manual_seed(seed), sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    query, key = normal(tokens, key_heads, 6), normal(tokens, key_heads, 6)
    return [query, key, normal(tokens, 4, 5), -SPEEDS * normal(tokens, 4).exp(), normal(tokens, 4).sigmoid()]


def with_gradients(function, given: list[Tensor], lengths) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    out = function(*leaves, lengths)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16().double()  # in any type
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def same(found: list[Tensor], wanted: list[Tensor], bound: float = 1e-11) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= bound * (b.norm() + 1e-30)


def of_transformers(name: str):
    """A function of transformers that computes in fp64 where it says fp32; it takes one document at a time, as it
    ignores their borders on a CPU."""
    module = importlib.import_module(TRANSFORMERS)
    function = getattr(module, name)
    source = inspect.getsource(getattr(function, "__wrapped__", function))
    space = dict(vars(module))
    exec(source[source.index("def ") :].replace("torch.float32", "torch.float64"), space)

    def by_document(*tensors_and_lengths):
        *tensors, lengths = tensors_and_lengths
        outs = []
        for query, key, value, log_decay, rate in zip(*(t.split(lengths) for t in tensors)):
            out, _ = space[name](
                query[None], key[None], value[None], g=log_decay[None], beta=rate[None], use_qk_l2norm_in_kernel=True
            )
            outs.append(out[0])
        return torch.cat(outs)

    return by_document


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_chunks_are_the_recurrence(lengths, key_heads):
    given = inputs(lengths, key_heads)
    same(with_gradients(delta_rule, given, lengths), with_gradients(token_by_token, given, lengths))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.one_of(st.integers(1, 3), st.integers(1, 150)), min_size=1, max_size=6).map(tuple))
def test_any_documents(lengths):
    given = inputs(lengths)
    same(with_gradients(delta_rule, given, lengths), with_gradients(token_by_token, given, lengths))


@pytest.mark.parametrize("chunks", [1, 3, 5])
@pytest.mark.parametrize("lengths", [*ROWS[-2:], (700, 3)], ids=str)
def test_some_chunks_after_the_other(lengths, chunks, monkeypatch):
    """As in a row that is too long for a CPU's cache."""
    given = inputs(lengths)
    together = with_gradients(delta_rule, given, lengths)
    monkeypatch.setattr(isoloss.parallel.ops.gated_delta, "CACHED_ELEMENTS", chunks * 4 * CHUNK**2)
    same(with_gradients(delta_rule, given, lengths), together, 1e-14)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_rule_is_that_of_transformers(name):
    lengths = ROWS[-2]
    given = inputs(lengths)
    same(with_gradients(delta_rule, given, lengths), with_gradients(of_transformers(name), given, lengths))


@pytest.mark.parametrize("lengths", ROWS[-2:], ids=str)
def test_a_document_is_the_same_alone(lengths):
    def alone(*tensors_and_lengths):
        *tensors, lengths = tensors_and_lengths
        documents = zip(*(t.split(lengths) for t in tensors))
        return torch.cat([delta_rule(q, k, v, decay, rate, (len(q),)) for q, k, v, decay, rate in documents])

    given = inputs(lengths)
    same(with_gradients(delta_rule, given, lengths), with_gradients(alone, given, lengths), 1e-14)


@pytest.mark.parametrize("lengths", [(300, 2, 65), (400,)], ids=str)
def test_rounded_to_bf16_no_more_than_a_recurrence_in_fp32(lengths):
    """Of bf16 inputs: as near to fp64 as the recurrence in fp32, rounded in the end."""
    given = [t.bfloat16() for t in inputs(lengths)]
    exact = with_gradients(token_by_token, [t.double() for t in given], lengths)
    found = with_gradients(delta_rule, given, lengths)

    def in_fp32(*tensors_and_lengths):
        *tensors, lengths = tensors_and_lengths
        query, key, value, log_decay, rate = (t.float() for t in tensors)
        return token_by_token(query, key, value, log_decay, rate, lengths).bfloat16()

    twin = with_gradients(in_fp32, given, lengths)
    for a, b, wanted in zip(found, twin, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - wanted).norm() <= 1.02 * (b.double() - wanted).norm() < 0.01 * wanted.norm()


@given(lengths=st.lists(st.integers(0, 3 * CHUNK), max_size=8).map(tuple))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_chunks_of_a_document_follow_each_other(lengths):
    """A walk through the turns of the scan: chunk i of a turn follows chunk i of the turn before."""
    chunks = chunks_of(lengths)
    assert sorted(chunks.turns) == list(chunks.turns) and chunks.slots.unique().numel() == sum(lengths)
    first = torch.tensor([0, *chunks.turns]).cumsum(0)
    turn_of = {int(chunk): turn for turn in range(len(chunks.turns)) for chunk in range(first[turn], first[turn + 1])}
    start = 0
    for length in lengths:
        mine = (chunks.slots[start : start + length] // CHUNK).unique_consecutive().tolist()
        start += length
        places = [(turn_of[chunk], chunk - int(first[turn_of[chunk]])) for chunk in mine]
        assert len(mine) == -(-length // CHUNK)
        if mine:
            turn, place = places[0]
            assert turn == 0 or place >= chunks.turns[turn - 1]  # a document begins: it follows no chunk
            assert places == [(turn + k, place) for k in range(len(mine))] and places[-1][0] == len(chunks.turns) - 1


# ---- the convolution -------------------------------------------------------------------------------------------------


def by_document(x_TX: Tensor, weight_XK: Tensor, lengths) -> Tensor:
    """PyTorch's convolution of each document for itself."""
    width = weight_XK.shape[1]
    outs = [
        conv1d(x.T[None], weight_XK[:, None], padding=width - 1, groups=len(weight_XK))[0, :, : len(x)].T
        for x in x_TX.split(lengths)
    ]
    return silu(torch.cat(outs))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("lengths", [*ROWS, (700, 1, 2, 3, 4, 600)], ids=str)
def test_the_convolution_is_that_of_each_document(lengths, width):
    """The last row is longer than what is computed at a time."""
    random = torch.Generator().manual_seed(0)
    channels = 7 if max(lengths) < 600 else 600
    x, weight = (torch.randn(*shape, generator=random, dtype=torch.float64)
                 for shape in ((sum(lengths), channels), (channels, width)))  # fmt: skip
    same(with_gradients(short_convolution, [x, weight], lengths), with_gradients(by_document, [x, weight], lengths))


def test_the_convolution_computes_bf16_in_fp32():
    random, lengths = torch.Generator().manual_seed(0), (90, 2, 40)
    given = [torch.randn(132, 9, generator=random).bfloat16(), torch.randn(9, 4, generator=random).bfloat16()]
    found, exact = (with_gradients(f, g, lengths) for f, g in (
        (short_convolution, given), (by_document, [t.double() for t in given])))  # fmt: skip
    for a, wanted in zip(found, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - wanted).norm() <= 1.02 * (wanted.bfloat16().double() - wanted).norm()


def test_what_is_not_a_number_stays_in_its_document():
    x = torch.randn(20, 3)
    x[8:10] = torch.nan  # a document of two tokens
    x.requires_grad_()
    weight = torch.randn(3, 4, requires_grad=True)
    out = short_convolution(x, weight, (8, 2, 10))
    assert out[8:10].isnan().all() and not out[:8].isnan().any() and not out[10:].isnan().any()
    grad = torch.zeros(20, 3)
    grad[10:] = 1
    (of_x,) = torch.autograd.grad(out, x, grad)
    assert not of_x[10:].isnan().any()


# ---- the layer -------------------------------------------------------------------------------------------------------


def test_the_layer_is_that_of_transformers(one_rank):
    """By its weights, in fp32, and its gradients; transformers sees each document alone. With slow decays: the gradient
    of fast ones is a difference of large sums, of which neither keeps more digits in fp32."""
    module = importlib.import_module(TRANSFORMERS)
    settings_ = importlib.import_module("transformers.models.qwen3_5.configuration_qwen3_5")
    arch = architecture()
    delta, lengths = delta_of(arch), (70, 2, 133)
    case = random_case(lengths, arch, 0)
    case.weights["A_log"] -= 3
    mesh = Mesh.create(Layout())
    layer = build(arch, mesh, torch.float32)
    load(layer, case, mesh)
    theirs = module.Qwen3_5GatedDeltaNet(
        settings_.Qwen3_5TextConfig(
            hidden_size=arch.hidden_size, num_hidden_layers=4, linear_num_key_heads=delta.key_heads,
            linear_num_value_heads=delta.value_heads, linear_key_head_dim=delta.key_dim,
            linear_value_head_dim=delta.value_dim, head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        ),
        0,
    )  # fmt: skip
    whole = case.weights
    parts = [whole[f"in_proj.weight.{part}"] for part in ("query", "key", "value")]
    state = {"in_proj_qkv.weight": torch.cat(parts), "in_proj_z.weight": whole["in_proj.weight.z"],
             "in_proj_b.weight": whole["in_proj.weight.beta"], "in_proj_a.weight": whole["in_proj.weight.alpha"],
             "conv1d.weight": torch.cat([whole[f"conv1d.weight.{part}"] for part in ("query", "key", "value")]),
             "norm.weight": whole["out_norm.weight"], "out_proj.weight": whole["out_proj.weight"],
             "A_log": whole["A_log"], "dt_bias": whole["dt_bias"]}  # fmt: skip
    theirs.load_state_dict(state)

    hidden = case.hidden.float()
    ours = layer(hidden[:, None], None, packed_seq_params=PackedRow(lengths=lengths))[0][:, 0]
    wanted = torch.cat([theirs(document[None])[0] for document in hidden.split(lengths)])
    (ours * case.grad).sum().backward()
    (wanted * case.grad).sum().backward()
    grads = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "norm.weight": layer.out_norm.weight,
             "conv1d.weight": layer.conv1d.weight, "out_proj.weight": layer.out_proj.weight}  # fmt: skip
    named_theirs = dict(theirs.named_parameters())
    pairs = [(ours, wanted), *((one.grad, named_theirs[name].grad) for name, one in grads.items())]
    for a, b in pairs:
        assert a is not None and (a - b).norm() < 4e-6 * b.norm()


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_a_document_goes_on_token_by_token(lengths, key_heads):
    """From the state that its beginning left: each further token, of all documents at once, is that of the whole."""
    more = 3
    longer = tuple(length + more for length in lengths)
    given = inputs(longer, key_heads)
    documents = [t.split(longer) for t in given]
    wanted = delta_rule(*given, longer).split(longer)
    begun = [torch.cat([d[:-more] for d in each]) for each in documents]
    out, state = delta_rule_and_states(DeltaInputs(*begun), lengths)
    same([out], [torch.cat([each[:-more] for each in wanted])])
    for token in range(-more, 0):
        out = delta_rule_next(DeltaInputs(*(torch.stack([d[token] for d in each]) for each in documents)), state)
        same([out], [torch.stack([each[token] for each in wanted])])


@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_a_convolution_goes_on_token_by_token(lengths):
    more, random = 5, torch.Generator().manual_seed(4)
    longer = tuple(length + more for length in lengths)
    x_TX, weight_XK = (torch.randn(n, m, generator=random, dtype=torch.float64) for n, m in ((sum(longer), 7), (7, 4)))
    documents = x_TX.split(longer)
    wanted = short_convolution(x_TX, weight_XK, longer).split(longer)
    before = last_tokens(torch.cat([d[:-more] for d in documents]), lengths, 3)
    for token in range(-more, 0):
        out, before = convolution_next(torch.stack([d[token] for d in documents]), before, weight_XK)
        same([out], [torch.stack([each[token] for each in wanted])])
