"""The model that is trained generates: what it says of its tokens is what training computes of them, on any layout, and
the tokens are those of the transformers backend."""

from unittest import mock

import pytest
import torch
from support.models.families import MODELS, VOCAB
from support.models.transformers_parity import make_engine
from support.runs import rollouts

from isoloss.engine.rl.backends.local.continuous_batching import ActiveSequence
from isoloss.engine.rl.backends.local.megatron_backend import MegatronDecoder
from isoloss.engine.rl.trajectory import Request, Sampling
from isoloss.parallel.ops.block_attention import Heads
from isoloss.parallel.ops.kv_cache import KeyValueCache
from isoloss.parallel.ops.prepacked import PackedMatrix

SAMPLING = Sampling(max_new_tokens=20, stop_token_ids=tuple(range(0, VOCAB, 9)), seed=3)


def make_requests(count: int = 11) -> list[Request]:
    """Three completions of a prompt, of the last one fewer; the second prompt is longer than the windows."""
    random = torch.Generator().manual_seed(6)
    prompts = [torch.randint(VOCAB, (1 + 11 * k % 37,), generator=random).tolist() for k in range(count)]
    return [Request(f"{k // 3}/{k}", tuple(prompts[k // 3])) for k in range(count)]


@pytest.mark.parametrize("family", MODELS)
def test_the_tokens_are_those_of_transformers(family, tiny_hf, pool):
    """After each of three steps, and log-probabilities as the trainer computes them."""
    requests = make_requests()
    (found,) = pool.run(1, rollouts.rounds, tiny_hf(family), requests, SAMPLING, {}, 3, "megatron")
    (wanted,) = pool.run(1, rollouts.rounds, tiny_hf(family), requests, SAMPLING, {}, 3)
    for here, there in zip(found, wanted, strict=True):
        assert [(c.id, c.tokens, c.finish) for c in here.completions] == [
            (c.id, c.tokens, c.finish) for c in there.completions
        ]
        assert here.worst <= 2e-5 < 1e-1 < here.stale


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        ("qwen3", 2, {"tp": 2}),
        ("mistral", 2, {"tp": 2, "sequence_parallel": False}),
        ("mistral", 2, {}),
        ("mistral", 2, {"ulysses": 2}),
        ("qwen3-moe", 2, {"ring": 2}),
        ("llama", 4, {"tp": 2}),
        ("qwen2", 2, {"pp": 2}),  # with tied embeddings
        ("mistral", 2, {"pp": 2, "vpp": 2}),
        ("qwen3-moe", 2, {"ep": 2}),
        ("deepseek-v3", 4, {"pp": 2, "ep": 2}),
        ("mixtral", 4, {"tp": 2, "ep": 2, "etp": 2}),
        ("gemma-4", 2, {"tp": 2}),  # keys and values of other sizes in every layer; capped logits
        ("gemma-4", 2, {"pp": 2}),
        ("gemma-4-moe", 2, {"tp": 2, "ep": 2}),  # a dense MLP beside the experts
        ("qwen3.5", 2, {"tp": 2}),
        ("qwen3.5-moe", 2, {"ulysses": 2}),
    ],
    ids=str,
)
def test_any_layout_gives_the_same_tokens(family, world, parallel, tiny_hf, pool):
    """Linear attention in fp64: its chunks lose a digit of fp32 to the recurrence, transformers' as much as ours."""
    requests, folder = make_requests(), tiny_hf(family, num_hidden_layers=4)
    precision, bound = ("fp64", 1e-11) if family.startswith("qwen3.5") else ("fp32", 2e-5)
    asked = folder, requests, SAMPLING
    (wanted,) = pool.run(1, rollouts.rounds, *asked, {}, 2, "megatron", precision)
    for found in pool.run(world, rollouts.rounds, *asked, parallel, 2, "megatron", precision):
        for here, there in zip(found, wanted, strict=True):
            assert [(c.id, c.tokens) for c in here.completions] == [(c.id, c.tokens) for c in there.completions]
            assert here.worst <= bound


def test_what_decodes_is_packed_and_training_never_sees_it(tiny_hf, one_rank):
    """Each linear layer and the head multiply by a packed matrix in a decode of fp32 weights, and by their own weights
    before and after, also where the decode fails."""
    engine = make_engine(tiny_hf("qwen2"), "fp32")  # whose linear layers have biases
    decoder = MegatronDecoder(engine.whole_model())
    rows = [ActiveSequence.start(request, SAMPLING) for request in make_requests(4)]
    batch, logits_BV = decoder.prefill(rows)
    for row in rows:
        row.tokens.append(5)
    with mock.patch.object(PackedMatrix, "product", autospec=True, side_effect=PackedMatrix.product) as product:
        found_BV = decoder.decode(batch)
    layers = engine.arch.num_layers
    assert product.call_count == 4 * layers + 1
    _, wanted_BV = decoder.prefill(rows)  # by the weights
    assert torch.allclose(found_BV, wanted_BV, rtol=0, atol=1e-5) and not torch.equal(logits_BV, wanted_BV)
    with mock.patch.object(PackedMatrix, "product", side_effect=RuntimeError), pytest.raises(RuntimeError):
        decoder.decode(batch)
    assert not any("_forward_impl" in vars(module) for module in engine.model.modules[0].modules())


def test_what_is_not_fp32_is_not_packed(tiny_hf, one_rank):
    decoder = MegatronDecoder(make_engine(tiny_hf("qwen2"), "fp64").whole_model())
    rows = [ActiveSequence.start(make_requests(1)[0], SAMPLING)]
    batch, _ = decoder.prefill(rows)
    rows[0].tokens.append(5)
    with mock.patch.object(PackedMatrix, "product", side_effect=AssertionError):
        assert decoder.decode(batch).dtype == torch.float64


def dense(query_HD, key_KTD, value_KTU, scale, window, sinks_H):
    """Attention of one query, the newest, by one softmax."""
    heads = len(query_HD) // len(key_KTD)
    key, value = (t.repeat_interleave(heads, 0) for t in (key_KTD, value_KTU))
    scores_HT = torch.einsum("hd,htd->ht", query_HD, key) * scale
    if window is not None:
        scores_HT[:, : max(0, scores_HT.shape[1] - window)] = -torch.inf
    if sinks_H is not None:
        scores_HT = torch.cat([scores_HT, sinks_H[:, None]], 1)
    return torch.einsum("ht,htu->hu", scores_HT.softmax(1)[:, : key.shape[1]], value)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_what_is_kept_is_what_dense_attention_sees(window, with_sinks):
    """Rows of three prompts come, go on, are let go of and joined by others; every token against one softmax."""
    random = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    sinks_H = draw(6) if with_sinks else None
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of every row, from its first token

    def begin(prompts: list[int], prompt_of: list[int]) -> KeyValueCache:
        cache = KeyValueCache(prompts, torch.device("cpu"))
        assert cache.reads_prompts
        key_RKD, value_RKU = draw(sum(prompts) + 2, 2, 8), draw(sum(prompts) + 2, 2, 5)  # with padding
        cache.keep_prompts(7, key_RKD, value_RKU)
        cache.begin(prompt_of)
        pieces = [t[:-2].transpose(0, 1).split(prompts, 1) for t in (key_RKD, value_RKU)]
        kept.extend((pieces[0][prompt], pieces[1][prompt]) for prompt in prompt_of)
        return cache

    def step(cache: KeyValueCache) -> None:
        rows = len(kept)
        query, key, value = draw(rows, 6, 8), draw(rows, 2, 8), draw(rows, 2, 5)
        found = cache.attend(7, query, key, value, Heads(0.7, window, sinks_H))
        cache.grown()
        for row in range(rows):
            kept[row] = tuple(torch.cat([old, new[row, :, None]], 1) for old, new in zip(kept[row], (key, value)))
            wanted = dense(query[row], *kept[row], 0.7, window, sinks_H)
            torch.testing.assert_close(found[row], wanted, rtol=1e-12, atol=1e-12)

    cache = begin([5, 3], [0, 0, 1, 0])
    for _ in range(3):
        step(cache)
    keep = [0, 2, 3]
    cache.select(keep)
    kept[:] = [kept[k] for k in keep]
    step(cache)
    cache.join(begin([11], [0, 0]))
    for _ in range(70):  # more than rows have room for at first
        step(cache)
    cache.select([4, 1])
    kept[:] = [kept[4], kept[1]]
    step(cache)
    assert cache.prompts == [11, 3]
