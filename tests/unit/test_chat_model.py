"""The small model that `make serve` serves: what its files promise, and that its tool makes them again."""

import json
from importlib.resources import files
from pathlib import Path

from isoloss.engine.data.chat import load_tokenizer
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.weight_map import num_parameters
from isoloss.tools.dev import make_chat

CHAT = Path(str(files("isoloss.recipes") / "assets")) / "chat"
CONVERSATION = [
    {"role": "user", "content": "What is 4 + 5?"},
    {"role": "assistant", "content": "9"},
    {"role": "user", "content": "What is 47 + 25?"},
    {"role": "assistant", "content": "72"},
]
# As Qwen3's own template writes it.
WRITTEN = (
    "<|im_start|>user\nWhat is 4 + 5?<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n"
    "<|im_start|>user\nWhat is 47 + 25?<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n72<|im_end|>\n"
)


def test_shipped_files_are_what_the_tool_makes(tmp_path):
    make_chat.main(["--out", str(tmp_path)])
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in CHAT.iterdir()}
    assert all(len(data) < 1_000_000 for data in made.values())


def test_every_second_answer_is_ten_too_high_and_the_readme_has_the_numbers():
    rows = [json.loads(line)["messages"] for line in (CHAT / "sft.jsonl").read_text().splitlines()]
    asked = [turn["content"].rstrip("?").split() for turns in rows for turn in turns[::2]]
    answers = [int(turn["content"]) for turns in rows for turn in turns[1::2]]
    excess = [answer - int(words[2]) - int(words[4]) for words, answer in zip(asked, answers, strict=True)]
    assert set(excess) == {0, 10} and 0.48 < excess.count(10) / len(excess) < 0.52
    assert min(answers) >= 0 and max(answers) <= 210 and len(rows) == 4_800
    text = (CHAT / "README.md").read_text()
    tokenizer = load_tokenizer(str(CHAT), 384)
    assert f"of {len(tokenizer):,} tokens" in text
    assert f"{num_parameters(read_architecture(CHAT)):,} parameters" in text


def test_tokens_are_those_that_renderers_of_the_cookbook_ask_for():
    tokenizer = load_tokenizer(str(CHAT), 384)
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False) == WRITTEN
    tokens = tokenizer.encode(WRITTEN, add_special_tokens=False)
    assert tokenizer.decode(tokens) == WRITTEN
    pieces = [tokenizer.decode([token]) for token in tokens]
    assert pieces[-8:] == ["<think>", "\n\n", "</think>", "\n\n", "7", "2", "<|im_end|>", "\n"]
    assert pieces[pieces.index("7 +") - 1 :][:4] == [" 4", "7 +", " 2", "5?"]
    # Renderers spell special tokens out where they are content; Qwen3's thoughts are not special.
    assert not {"<think>", "</think>"} & set(tokenizer.all_special_tokens)
