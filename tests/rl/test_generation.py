"""Continuous batching changes nothing: every row is as if it were generated alone, by the plainest loop there is."""

import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.models import transformers_fp64
from support.models.families import DENSE, MODELS, VOCAB, write_folder
from transformers import AutoModelForCausalLM, PreTrainedModel

from isoloss.engine.rl.backends.local import continuous_batching
from isoloss.engine.rl.backends.local.base import check_request
from isoloss.engine.rl.backends.local.continuous_batching import ActiveSequence, RowScheduler
from isoloss.engine.rl.backends.local.sampling import choose, choose_directly, exponentials, noise_key
from isoloss.engine.rl.backends.local.transformers_decoder import TransformersDecoder
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

LENGTHS = (5, 31, 1, 17)  # of the prompts; windows are 9 and 11 tokens
STOPS = tuple(range(0, VOCAB, 9))
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8, seed=3)


def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    concurrency: int,
    version: int,
    proceed: Callable[[bool], bool] = lambda working: working,
    arrived: Callable[[Completion], object] = lambda completion: None,
    text: Callable[[Sequence[int]], str] = lambda tokens: "",
) -> list[Completion]:
    """All at once, in their order; what is left when `proceed` says no is aborted."""
    done: dict[str, Completion] = {}

    def ended(row: ActiveSequence) -> None:
        done[row.request.id] = row.completion()
        if row.finish is not None:
            arrived(row.completion())

    rows = RowScheduler(TransformersDecoder(model), concurrency, version, ended, text)
    rows.add([ActiveSequence.start(request, sampling) for request in requests])
    with torch.inference_mode():
        while proceed(rows.busy):
            rows.step()
    rows.abort()
    return [done[request.id] for request in requests]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Callable[[str], PreTrainedModel]:
    """The tiny model of a family, in fp64 up to what its router computes in fp32."""
    made: dict[str, PreTrainedModel] = {}

    def of(family: str) -> PreTrainedModel:
        if family not in made:
            folder = write_folder(family, tmp_path_factory.mktemp(family))
            made[family] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, experts_implementation="eager"
            )
            if made[family].config._attn_implementation == "sdpa":  # eager attention casts to fp32
                norm = type(made[family].model.norm)
                forward = transformers_fp64.doubled(norm.forward, sys.modules[norm.__module__])
                for module in made[family].modules():
                    if isinstance(module, norm):
                        module.forward = forward.__get__(module)
        return made[family]

    return of


def make_requests(completions: int = 3) -> list[Request]:
    """Of each of a few prompts, so many."""
    random = torch.Generator().manual_seed(4)
    prompts = [tuple(torch.randint(VOCAB, (length,), generator=random).tolist()) for length in LENGTHS]
    return [Request(f"{k}/{i}", prompt) for k, prompt in enumerate(prompts) for i in range(completions)]


def alone(model: PreTrainedModel, request: Request, sampling: Sampling) -> Completion:
    """The readable twin: one row, no cache, no padding, a loop over the vocabulary."""
    tokens, logprobs = list(request.prompt_tokens), []
    for position in range(sampling.max_new_tokens):
        with torch.inference_mode():
            logits_V = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        token, logprob = choose_alone(
            logits_V.double().numpy(), noise_key(sampling.seed, request.id, position), sampling
        )
        tokens.append(token)
        logprobs.append(logprob)
        if token in sampling.stop_token_ids:
            break
    new = tuple(tokens[len(request.prompt_tokens) :])
    finish = "stop" if new[-1] in sampling.stop_token_ids else "length"
    return Completion(request.id, new, tuple(logprobs), (0,) * len(new), finish)


def exponential_alone(key: int, token: int) -> float:
    """SplitMix64 in Python's integers, as its authors publish it (the state moves by the golden ratio), then -log."""
    mask = 2**64 - 1
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return float(-np.log1p(-((z >> 12) + 0.5) / 2**52))


def choose_alone(logits_V: np.ndarray, key: int, sampling: Sampling) -> tuple[int, float]:
    if sampling.temperature > 0:
        logits_V = logits_V / sampling.temperature
    logprobs_V = logits_V - logits_V.max()
    logprobs_V -= np.log(np.exp(logprobs_V).sum())
    if sampling.temperature == 0:
        token = int(logits_V.argmax())
        return token, float(logprobs_V[token])
    nucleus, mass = set(), 0.0
    for token in sorted(range(len(logprobs_V)), key=lambda token: (-logprobs_V[token], token)):
        if mass >= sampling.top_p or len(nucleus) == sampling.top_k:
            break
        nucleus.add(token)
        mass += np.exp(logprobs_V[token])
    gumbels = {token: logprobs_V[token] - np.log(exponential_alone(key, token)) for token in nucleus}
    token = max(gumbels, key=gumbels.__getitem__)
    return token, float(logprobs_V[token])


def assert_same(found: list[Completion], wanted: list[Completion], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.id, one.tokens, one.versions, one.finish) == (other.id, other.tokens, other.versions, other.finish)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", MODELS)
def test_rows_are_as_if_alone(family, model, monkeypatch):
    requests = make_requests(2)
    if hasattr(model(family).config, "linear_num_key_heads"):  # the delta rule casts to fp32
        transformers_fp64.compute_in(sys.modules[type(model(family)).__module__], monkeypatch)
    found = generate(model(family), requests, SAMPLING, concurrency=3, version=0)
    assert_same(found, [alone(model(family), r, SAMPLING) for r in requests], 1e-10 if family in DENSE else 1e-6)


@pytest.mark.parametrize("concurrency", [1, 3, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.6},
        {"top_k": 3},
        {"top_k": 9, "top_p": 0.6},
        {"temperature": 0.0},
        {"stop_token_ids": tuple(range(0, VOCAB, 9))},
    ],
)
def test_any_concurrency_and_sampling(concurrency, changes, model):
    requests, sampling = make_requests(), Sampling(**{**vars(SAMPLING), **changes})
    found = generate(model("mistral"), requests, sampling, concurrency, version=0)
    wanted = [alone(model("mistral"), r, sampling) for r in requests]
    assert_same(found, wanted, 1e-10)
    assert {c.finish for c in found} == ({"stop", "length"} if sampling.stop_token_ids else {"length"})


@pytest.mark.parametrize("family", ["mistral", "qwen3-moe"])
def test_greedy_is_that_of_transformers(family, model):
    requests = make_requests(1)
    sampling = Sampling(max_new_tokens=20, temperature=0.0)
    model(family).generation_config.eos_token_id = None
    for request, found in zip(requests, generate(model(family), requests, sampling, 64, version=0)):
        prompt = torch.tensor([request.prompt_tokens])
        wanted = model(family).generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert found.tokens == tuple(wanted[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.7, 0.8, -1), (0.7, 1.0, 12)])
def test_tokens_are_as_frequent_as_they_are_probable(temperature, top_p, top_k, model):
    draws, prompt = 20_000, make_requests()[0].prompt_tokens
    sampling = Sampling(1, temperature, top_p, seed=11, top_k=top_k)
    requests = [Request(str(k), prompt) for k in range(draws)]
    found = generate(model("llama"), requests, sampling, draws, version=0)
    with torch.inference_mode():
        logits_V = model("llama")(input_ids=torch.tensor([prompt])).logits[0, -1]
    probabilities_V = (logits_V / temperature).softmax(-1)
    order_V = probabilities_V.argsort(descending=True)
    size = int((probabilities_V[order_V].cumsum(0) < top_p).sum()) + 1 if top_p < 1 else VOCAB
    size = min(size, top_k) if top_k > 0 else size
    nucleus_V = torch.zeros_like(probabilities_V).scatter(0, order_V[:size], 1.0) * probabilities_V
    expected_V = (nucleus_V / nucleus_V.sum() * draws).numpy()
    counts_V = np.bincount([c.tokens[0] for c in found], minlength=VOCAB)
    assert counts_V[expected_V == 0].sum() == 0
    often = expected_V >= 5
    rest = max(expected_V[~often].sum(), 1e-9)
    chi2 = ((counts_V - expected_V)[often] ** 2 / expected_V[often]).sum() + (counts_V[~often].sum() - rest) ** 2 / rest
    freedom = often.sum()
    assert abs(chi2 - freedom) < 4 * (2 * freedom) ** 0.5  # a biased or a too regular draw


def keys(num: int) -> list[int]:
    return [noise_key(0, str(k), 0) for k in range(num)]


def test_the_exponentials_are_those_of_splitmix64():
    """Outputs of its reference implementation for the seed 1234567, in the upper 52 bits; and the moments."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    wanted = [-np.log1p(-((z >> 12) + 0.5) / 2**52) for z in known]
    assert exponentials([1234567], 5, torch.device("cpu"))[0].tolist() == pytest.approx(wanted, rel=1e-14)
    numbers_BV = exponentials(keys(500), 2000, torch.device("cpu"))
    assert float(numbers_BV.min()) > 0 and numbers_BV.isfinite().all()
    for power, moment in ((1, 1.0), (2, 2.0), (3, 6.0)):  # n! of the exponential distribution
        found = numbers_BV**power
        assert abs(float(found.mean()) - moment) < 4 * float(found.std()) / 1000
    between_tokens = torch.corrcoef(numbers_BV.T[:50]) - torch.eye(50)
    between_keys = torch.corrcoef(numbers_BV[:50]) - torch.eye(50)
    assert between_tokens.abs().max() < 5 / 500**0.5 and between_keys.abs().max() < 5 / 2000**0.5


def test_a_probability_of_0_is_never_drawn():
    logits_BV = torch.tensor([-torch.inf, 1.0, -800.0, 0.5, -torch.inf]).expand(1000, 5)
    assert set(choose(logits_BV, keys(1000), Sampling(1))[0].tolist()) == {1, 3}
    one_BV = torch.tensor([-torch.inf, -torch.inf, 0.0]).expand(1000, 3)
    assert set(choose(one_BV, keys(1000), Sampling(1))[0].tolist()) == {2}
    equal_BV = torch.zeros(1000, 4)
    assert set(choose(equal_BV, keys(1000), Sampling(1, top_p=0.5))[0].tolist()) == {0, 1}
    assert set(choose(equal_BV, keys(1000), Sampling(1, top_k=3))[0].tolist()) == {0, 1, 2}
    assert set(choose(equal_BV, keys(1000), Sampling(1, top_p=0.5, top_k=3))[0].tolist()) == {0, 1}
    assert set(choose(equal_BV, keys(1000), Sampling(1, top_k=9))[0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [0, -2])
def test_a_top_k_of_no_token_is_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k} must be at least 1, or -1"):
        Sampling(1, top_k=top_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])  # of the logits: all alike, as at random weights, as when trained
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_tokens_of_a_cpu_are_those_of_all_ratios(dtype, spread, temperature, monkeypatch):
    """It computes few of them. Of the random numbers some are rounded to 0 where it bounds them: 1 of 2**24."""
    monkeypatch.setattr("isoloss.engine.rl.backends.local.sampling.ROOM", 5000)  # several rows at a time, and a rest
    logits_BV = spread * torch.randn(1002, 1000, generator=torch.Generator().manual_seed(1), dtype=dtype)
    logits_BV[:, ::7] = -torch.inf
    sampling = Sampling(1, temperature)
    tokens_B, logprobs_B = choose(logits_BV, keys(1002), sampling)
    wanted_B, their_logprobs_B = choose_directly(logits_BV, keys(1002), sampling)
    assert torch.equal(tokens_B, wanted_B) and len(set(tokens_B.tolist())) > 50
    assert torch.allclose(logprobs_B, their_logprobs_B, rtol=0, atol=1e-14 if dtype == torch.float64 else 1e-6)


def test_a_number_whose_upper_bits_are_0_can_win():
    """By a weight of e^-25, and not by one of e^-40."""
    key = key_of_tiny_number(token=3)
    for weight, winner in ((-25.0, 3), (-40.0, 1)):
        logits_BV = torch.tensor([[-torch.inf, 0.0, -torch.inf, weight]])
        assert choose(logits_BV, [key], Sampling(1))[0].item() == winner
        assert choose_directly(logits_BV, [key], Sampling(1))[0].item() == winner


def key_of_tiny_number(token: int) -> int:
    """A key whose number for the token is (5 + 0.5) / 2^52: SplitMix64 backwards."""
    wrap, bits = (1 << 64) - 1, 5 << 12 | 77

    def undo_shift(value: int, by: int) -> int:
        found = value
        for _ in range(64 // by + 1):
            found = value ^ (found >> by)
        return found

    bits = undo_shift(bits, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & wrap
    bits = undo_shift(bits, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & wrap
    bits = undo_shift(bits, 30) - (token + 1) * 0x9E3779B97F4A7C15 & wrap
    return bits - (1 << 64) if bits >> 63 else bits


@pytest.mark.parametrize("noise", [1e-2, 1e-1])
def test_logits_that_differ_a_little_rarely_pick_other_tokens(noise):
    """At most twice as rarely as any sampler could (the total variation): the bound of the Gumbel-max coupling. The
    inverse cumulative distribution in the order of the vocabulary misses it a tenfold: it moves all later borders."""
    random = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(1000, generator=random, dtype=torch.float64).expand(4000, 1000)
    moved_BV = logits_BV + noise * torch.randn(logits_BV.shape, generator=random, dtype=torch.float64)
    variation = float((logits_BV.softmax(-1) - moved_BV.softmax(-1)).abs().sum(-1).mean() / 2)
    ours_B, others_B = (choose(x_BV, keys(4000), Sampling(1))[0] for x_BV in (logits_BV, moved_BV))
    share = float((ours_B != others_B).double().mean())
    assert 0 < share < 2 * variation + 3 * (2 * variation / 4000) ** 0.5, (share, variation)


def test_random_numbers_are_those_of_seed_and_id(model):
    requests = make_requests()
    found = generate(model("llama"), requests, SAMPLING, 5, version=0)
    assert_same(generate(model("llama"), requests[::-1], SAMPLING, 64, version=0)[::-1], found, 1e-10)
    of_a_prompt = {c.tokens for c in found[:3]}
    assert len(of_a_prompt) == 3
    other_seed = generate(model("llama"), requests, Sampling(24, 0.8, seed=4), 5, version=0)
    assert all(one.tokens != other.tokens for one, other in zip(found, other_seed))
    # Written down, so that a later version repeats the rollouts of this one.
    assert noise_key(3, "a", 0) == 2226862166707803112
    assert exponentials([2226862166707803112], 2, torch.device("cpu"))[0].tolist() == pytest.approx(
        [0.3639490771543879, 2.5791917749633084], rel=1e-14
    )


def test_an_aborted_completion_goes_on_as_if_never_stopped(model):
    requests = make_requests()
    whole = generate(model("mistral"), requests, SAMPLING, 64, version=1)
    for forwards in (0, 1, 7):
        countdown = iter([True] * forwards + [False])
        stopped = generate(model("mistral"), requests, SAMPLING, 5, version=1, proceed=lambda _, c=countdown: next(c))
        assert {c.finish for c in stopped} == {"abort"}
        assert [len(c.tokens) for c in stopped] == [forwards] * 5 + [0] * (len(requests) - 5)
        again = [Request(r.id, r.prompt_tokens, partial) for r, partial in zip(requests, stopped)]
        found = generate(model("mistral"), again, SAMPLING, 5, version=2)
        for one, partial, wanted in zip(found, stopped, whole, strict=True):
            done = len(partial.tokens)
            assert (one.tokens, one.finish) == (wanted.tokens, wanted.finish)
            assert one.logprobs[:done] == partial.logprobs
            assert one.versions == (1,) * done + (2,) * (len(one.tokens) - done)
            np.testing.assert_allclose(one.logprobs, wanted.logprobs, rtol=0, atol=1e-10)


def test_a_completion_that_is_over_is_left_alone(model):
    sampling = Sampling(3, stop_token_ids=(7,))
    stopped = Completion("a", (5, 7), (-1.0, -2.0), (0, 0), "abort")
    full = Completion("b", (5, 6, 8), (-1.0, -2.0, -3.0), (0, 0, 1), "abort")
    requests = [Request("a", (1, 2), stopped), Request("b", (1, 2), full)]
    found = generate(model("llama"), requests, sampling, 4, version=9)
    assert [(c.tokens, c.versions, c.finish) for c in found] == [
        ((5, 7), (0, 0), "stop"),
        ((5, 6, 8), (0, 0, 1), "length"),
    ]


def test_bf16_weights_have_the_logits_that_their_numbers_give(tmp_path):
    """Not rounded to bf16: a log-probability is that of last hidden state and head, as they are, in fp64."""
    folder = write_folder("llama", tmp_path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    sampling = Sampling(1, temperature=0.7, seed=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(5 / model.lm_head.weight.std() / model.config.hidden_size**0.5)
    for request in make_requests(2):
        (found,) = generate(model, [request], sampling, 1, version=0)
        with torch.inference_mode():
            hidden_D = model.base_model(torch.tensor([request.prompt_tokens])).last_hidden_state[0, -1]
        logits_V = model.lm_head.weight.double() @ hidden_D.double()
        assert 2 < logits_V.std() < 10
        wanted = torch.log_softmax(logits_V / 0.7, -1)[found.tokens[0]]
        assert found.logprobs[0] == pytest.approx(wanted.item(), abs=1e-4)


def shapes_of_forwards(model: PreTrainedModel, requests, sampling: Sampling, concurrency: int) -> list[tuple[int, ...]]:
    """[rows, columns] of every forward."""
    shapes = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    generate(model, requests, sampling, concurrency, version=0)
    hook.remove()
    return shapes


def test_a_free_place_is_filled_while_others_go_on(model):
    """With places for 4 rows: never more, a prompt is read once for the completions that begin together, and the next
    rows do not wait for the last of the present ones."""
    requests, sampling = make_requests(4), Sampling(24, stop_token_ids=STOPS, seed=3)
    lengths = [len(c.tokens) for c in generate(model("llama"), requests, sampling, 4, version=0)]
    shapes = shapes_of_forwards(model("llama"), requests, sampling, 4)
    assert shapes[0] == (1, LENGTHS[0])
    assert max(rows for rows, _ in shapes) == 4
    batch_after_batch = sum(max(lengths[k : k + 4]) for k in range(0, 16, 4))
    assert len([columns for _, columns in shapes if columns == 1]) < batch_after_batch
    assert sum(rows for rows, _ in shapes) <= sum(lengths)  # a row of a forward gives a token at least


def test_prompts_are_read_within_the_budget(model, monkeypatch):
    wanted = generate(model("llama"), make_requests(), SAMPLING, 64, version=0)
    assert shapes_of_forwards(model("llama"), make_requests(), SAMPLING, 64)[:2] == [(4, 31), (12, 1)]
    monkeypatch.setattr(continuous_batching, "MAX_PREFILL", 40)
    shapes = shapes_of_forwards(model("llama"), make_requests(), SAMPLING, 64)
    assert all(rows == 1 or rows * columns <= 40 for rows, columns in shapes if columns > 1)
    assert_same(generate(model("llama"), make_requests(), SAMPLING, 64, version=0), wanted, 1e-10)


def test_mistakes_name_the_request():
    with pytest.raises(UserError, match=r"^rows\.jsonl:3/0: the prompt has no tokens"):
        check_request(Request("rows.jsonl:3/0", ()), SAMPLING, 128)
    too_long = Request("rows.jsonl:4/0", (1,) * 105)
    check_request(Request("a", (1,) * 104), SAMPLING, 128)
    with pytest.raises(UserError, match=r"^rows\.jsonl:4/0: a prompt of 105 tokens and .*_tokens=24 .*=128"):
        check_request(too_long, SAMPLING, 128)


def test_each_completion_is_told_of_when_it_ends(model):
    """Once, whole, and while others go on; not those that were told to end."""
    told: list[Completion] = []
    steps: list[int] = []

    def going(working: bool) -> bool:
        steps.append(len(told))
        return working and len(told) < 9

    requests = make_requests()
    found = generate(model("qwen3"), requests, SAMPLING, 5, 7, going, told.append)
    assert len(set(steps)) > 2 and steps[-1] >= 9  # not all at the end
    assert sorted(c.id for c in told) == sorted(c.id for c in found if c.finish != "abort")
    assert all(completion == next(c for c in found if c.id == completion.id) for completion in told)
    assert any(c.finish == "abort" for c in found)
