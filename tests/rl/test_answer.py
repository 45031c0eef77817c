"""What of a completion is scored; values by hand."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isoloss.engine.rl.config import RewardConfig
from isoloss.engine.rl.reward.rewarder import Rewarder
from isoloss.engine.rl.trajectory import Completion, Prompt

SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|channel>", "<channel|>")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|return|>")


@pytest.fixture
def score(tokenizer):
    """score(functions, rows of (end of the prompt, completion, answer), **RewardConfig)"""

    def score(functions, rows, **config):
        prompts, completions = [], []
        for number, (opening, text, answer) in enumerate(rows):
            tokens = tokenizer.encode(text + "<|return|>")
            prompts.append(Prompt(f"t:{number}", tuple(tokenizer.encode("Ask." + opening)), "Ask.", answer))
            numbers = (0.0,) * len(tokens), (0,) * len(tokens)
            completions.append(Completion(f"t:{number}/0/0", tokens, *numbers, "stop"))
        with Rewarder(RewardConfig(function=functions, **({"workers": 1} | config)), tokenizer, prompts) as rewarder:
            return rewarder.score(prompts, completions)

    return score


ROWS = [  # (end of the prompt, completion, answer, math, exact_match, format)
    ("", r"\boxed{41} no, wait: \boxed{42}", "42", 1, 0, 0),
    ("", r"<think>\boxed{41}</think> \boxed{42}", "42", 1, 0, 1),
    ("", r"\boxed{42}. Check: \boxed{\frac{1}{2}}", "1/2", 1, 0, 0),
    ("", r"\boxed{42} or \boxed{4", "42", 0, 0, 0),
    ("", "<think>so 42</think> I do not know", "42", 0, 0, 1),
    ("", r"<think>\boxed{42}</think> The answer is 41", "42", 0, 0, 1),
    ("", "<think>a</think>41<think>so 42", "42", 0, 0, 0),
    ("<think>\n", "so 41\n</think>\n42", "42", 1, 1, 1),
    ("<think>\n", "so 42", "42", 0, 0, 0),
    ("[THINK]", "41[/THINK]42", "42", 1, 1, 1),
    ("", "<|channel>thought\n41<channel|>42", "42", 1, 1, 1),
    ("", f"{ANALYSIS}2+2, maybe 5? no<|end|>{FINAL}4", "4", 1, 1, 1),
    ("", f"{ANALYSIS}2+2, maybe 5? no<|end|>{FINAL}4", "5", 0, 0, 1),
    ("", f"{ANALYSIS}it is 4", "4", 0, 0, 0),
    ("", "<|channel|>final<|message|>4", "4", 1, 1, 0),
    ("<|channel|>final<|message|>", "4", "4", 1, 1, 0),
    ("", "4.0", 4, 1, 1, 0),
    ("", "4", 4.0, 1, 1, 0),
    ("", "four", 4, 0, 0, 0),
]


def test_one_rule_for_all_built_in_rewards(score):
    scored = score(("math", "exact_match", "format"), [row[:3] for row in ROWS])
    found = [(each.parts["math"], each.parts["exact_match"], each.parts["format"]) for each in scored]
    assert dict(enumerate(found)) == dict(enumerate(row[3:] for row in ROWS))


def test_an_answer_that_is_no_text_and_no_number_is_refused(score):
    for answer, name in ([4], "list"), (float("nan"), "float"), ({"a": 4}, "dict"):
        (scored,) = score(("exact_match",), [("", "4", answer)])
        assert f"the answer is {name}" in scored.error


def test_functions_are_given_the_texts(score, tmp_path):
    said = f"{ANALYSIS}5?<|end|>{FINAL}4"
    right = {"raw": said + "<|return|>", "marked": "<think>5?</think>\n4", "final": "\n4"[1:]}
    for each in "raw", "marked", "final":
        (tmp_path / "own.py").write_text(
            f"def own(completion_{each}): return float(completion_{each}.strip() == {right[each]!r})\n"
            f"def verl(solution_str, completion_{each}): return own(completion_{each})\n"
            f"def trl(completions_{each}): return [own(one) for one in completions_{each}]\n"
        )
        (scored,) = score(tuple(f"{tmp_path}/own.py:{name}" for name in ("own", "verl", "trl")), [("", said, None)])
        assert scored.reward == 3, (each, scored)


def test_verification_out_of_time_gives_0_and_is_counted(score):
    hangs, good = score(("math",), [("", r"\boxed{9^{9^{9^9}}}", "4"), ("", "4", "4")], timeout=2.0)
    assert (hangs.reward, hangs.error, hangs.timed_out) == (0.0, None, True)
    assert (good.reward, good.timed_out) == (1.0, False)
