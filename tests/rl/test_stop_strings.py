"""A completion ends with the first token after which the text of all its tokens holds a stop string: by brute force."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from support.models.families import write_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, StopStringCriteria

from isoloss.engine.rl.backends.local.stop_strings import TokenizerText, ends_in
from isoloss.engine.rl.backends.local.transformers_backend import TransformersBackend
from isoloss.engine.rl.backends.protocol import RolloutBackend
from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

VOCAB = 96
PIECES = ("a", "b", "ab", " a", "stop", "st", "op", "sto", " stopper", "é", "日", "\n", "\n\n", "END", " ", "a b")
STOPS = (("stop",), ("\n\n", "END"), ("é日",), ("日", "ab a"), ("bst",), (" a",), ("op\n",))


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte of the pieces alone, and the pieces: 日 may come in three tokens or in one."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = ["".join(part for part, _ in alphabet.pre_tokenize_str(piece)) for piece in PIECES]
    vocabulary = {token: k for k, token in enumerate(dict.fromkeys([*spelled, *"".join(spelled)]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = alphabet
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece has them: ▁ for a space, one at the beginning being dropped, and bytes that are in no piece."""
    pieces = [piece.replace(" ", "▁") for piece in PIECES if piece not in ("é", "日")]
    vocabulary = {token: k for k, token in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in "é日".encode())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(params=[byte_level, byte_fallback], ids=["byte-level", "byte-fallback"])
def text(request, tmp_path) -> TokenizerText:
    request.param().save_pretrained(tmp_path)
    return TokenizerText(tmp_path, VOCAB)


def end_by_brute_force(tokens: Sequence[int], stops: Sequence[str], text: Callable[[Sequence[int]], str]) -> int:
    ends = (n for n in range(1, len(tokens) + 1) if any(stop in text(tokens[:n]) for stop in stops))
    return next(ends, len(tokens) + 1)


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_the_end_is_that_of_the_whole_text(stops, text):
    """Of random tokens, half characters among them, and of texts of whole characters."""
    draw, size, found = random.Random(5), len(text.tokenizer), 0
    characters = [text.tokenizer.convert_tokens_to_ids(text.tokenizer.tokenize(piece)) for piece in ("é", "日")]
    whole = [[token] for token in range(size) if "\ufffd" not in text([token])] + characters
    for case in range(300):
        units = [[token] for token in range(size)] if case % 3 == 0 else whole
        tokens = [token for unit in draw.choices(units, k=draw.randint(1, 60)) for token in unit]
        end = next((n for n in range(1, len(tokens) + 1) if ends_in(tokens[:n], stops, text)), len(tokens) + 1)
        assert end == end_by_brute_force(tokens, stops, text), (text(tokens), tokens)
        found += end <= len(tokens)
    assert found > 10


def test_it_is_where_transformers_ends_too(tmp_path):
    byte_level().save_pretrained(tmp_path)
    text, draw = TokenizerText(tmp_path, VOCAB), random.Random(2)
    for stops in (("stop",), ("\n\n", "END"), (" a",)):
        criteria, ended = StopStringCriteria(text.tokenizer, list(stops)), 0
        for _ in range(40):
            tokens = draw.choices(range(len(PIECES)), k=30)
            theirs = lambda n: bool(criteria(torch.tensor([tokens[:n]]), torch.empty(0)))  # noqa: B023
            end = next((n for n in range(1, 31) if theirs(n)), 31)
            assert end == next((n for n in range(1, 31) if ends_in(tokens[:n], stops, text)), 31)
            ended += end <= 30
        assert ended > 10


def test_only_the_end_of_a_long_text_is_decoded():
    asked = []
    letters = lambda tokens: asked.append(len(tokens)) or "".join(chr(97 + token) for token in tokens)
    assert not ends_in([0] * 5000, ("ab", "baa"), letters) and ends_in([0] * 5000 + [1], ("ab", "baa"), letters)
    assert max(asked) < 10


@pytest.fixture
def backend(tmp_path, one_rank):
    folder = write_folder("llama", tmp_path)
    byte_level().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    made = TransformersBackend(folder, torch.float64, torch.device("cpu"), 4)
    made.update_weights([[(name, tensor) for name, tensor in model.state_dict().items()]], 1)
    yield made
    made.close()


def sampled(backend: RolloutBackend, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    return [each for each in backend.generate(requests, sampling) if each is not None]


def test_a_completion_keeps_the_tokens_of_its_stop_string(backend):
    """Each is a beginning of what it is without stop strings; one that goes on after an abort ends there too."""
    free, text = Sampling(40, temperature=1.5, seed=3), backend._text
    ending = Sampling(40, temperature=1.5, seed=3, stop=("a", "\n"))
    requests = [Request(str(k), (1, 2, 3 + k)) for k in range(12)]
    whole, found = sampled(backend, requests, free), sampled(backend, requests, ending)
    for one, other in zip(whole, found, strict=True):
        end = end_by_brute_force(one.tokens, ending.stop, text)
        assert other.tokens == one.tokens[:end] and other.finish == ("stop" if end <= 40 else "length")
    stopped = [k for k, each in enumerate(found) if each.finish == "stop" and len(each.tokens) > 2]
    assert stopped
    for k in stopped:
        half = len(found[k].tokens) // 2
        parts = found[k].tokens[:half], found[k].logprobs[:half], found[k].versions[:half]
        asked = Request(requests[k].id, requests[k].prompt_tokens, Completion(requests[k].id, *parts, "abort"))
        assert sampled(backend, [asked], ending)[0].tokens == found[k].tokens


def test_what_cannot_be_obeyed_is_refused(one_rank, tmp_path):
    for stop in ("", "a\ufffd"):
        with pytest.raises(ValueError, match="must be a text, without U\\+FFFD"):
            Sampling(1, stop=(stop,))
    without = TransformersBackend(write_folder("llama", tmp_path), torch.float32, torch.device("cpu"), 4)
    without._version = 1
    with pytest.raises(UserError, match=r"tokenizer: .* holds none"):
        without.submit(Request("a", (1,)), Sampling(1, stop=("x",)))
    without.close()
    servers = object.__new__(ServerBackend)
    with pytest.raises(UserError, match=r"a: stop=\['x'\] is not for servers: give stop_token_ids"):
        servers.submit(Request("a", (1,)), Sampling(1, stop=("x",)))
