"""What a reinforcement learning run starts from (engine/rl/setup.py)."""

import json
import shutil
from importlib.resources import files

import pytest

from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.rl.setup import stop_tokens
from isoloss.parallel.runtime.errors import UserError

TINY = files("isoloss.recipes") / "assets" / "tiny"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def base_model(tmp_path):
    """A folder whose tokenizer ends texts with another token than the chat template ends turns with, as Qwen2.5's."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(str(TINY / name), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_what_ends_a_turn_ends_a_completion(base_model):
    tokenizer = load_tokenizer(str(base_model), 2048)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert stop_tokens(base_model, tokenizer) == tuple(sorted((start, end)))
    (base_model / "config.json").write_text(json.dumps({"eos_token_id": [start, 7]}))
    assert stop_tokens(base_model, tokenizer) == tuple(sorted((start, end, 7)))
    (base_model / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))  # transformers looks here first
    assert stop_tokens(base_model, tokenizer) == tuple(sorted((start, end, 9)))


def test_nothing_that_ends_a_completion_is_refused(base_model):
    tokenizer = load_tokenizer(str(base_model), 2048)
    tokenizer.eos_token, tokenizer.chat_template = None, PLAIN
    with pytest.raises(UserError, match="names a token that ends a completion"):
        stop_tokens(base_model, tokenizer)
