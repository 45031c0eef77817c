"""The shipped tiny set: its splits, its tokenizer, and the loss that training on it must beat."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import load_dataset, unigram_nats
from isoloss.engine.data.token_dataset import DataStats, TokenDataset
from isoloss.tools.dev import make_tiny

TINY = str(files("isoloss.recipes") / "assets" / "tiny")


def load(name: str, tokenizer, tmp_path) -> TokenDataset:
    data = DataConfig(train=(f"{TINY}/{name}.jsonl",), max_length=512)
    return load_dataset(data, "train", str(tokenizer), vocab_size=2048, cache_dir=tmp_path / "cache")


def read(name: str) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in Path(TINY, name).read_text().splitlines()]


def test_tiny_splits_share_nothing():
    def keys(rows):
        paragraphs = (part for row in rows for part in row[1]["content"].split("\n\n"))
        found = (re.sub(r"[^a-z0-9]+", "", text.lower()) for text in paragraphs)
        return {text for text in found if len(text) >= 60}

    def documents(rows):
        return {row[0]["content"].split(" (part")[0] for row in rows}

    train, held_out = read("train.jsonl"), read("eval.jsonl")
    assert 4000 <= len(train) <= 6000 and 150 <= len(held_out) <= 250
    assert not keys(train) & keys(held_out)
    assert not documents(train) & documents(held_out)
    answers = [row[1]["content"] for row in train + held_out]
    assert all(text == text.strip() and len(text) >= 60 for text in answers)
    assert len(set(answers)) == len(answers) and all(text.isascii() for text in answers)
    assert sum(path.stat().st_size for path in Path(TINY).iterdir()) < 3_000_000


def test_tiny_with_and_without_marks(tmp_path):
    """On real rows too, comparing renderings finds the targets that the template marks."""
    shutil.copytree(TINY, tmp_path / "plain", ignore=shutil.ignore_patterns("*.jsonl"))
    template = tmp_path / "plain" / "chat_template.jinja"
    template.write_text(re.sub(r"\{% (end)?generation %\}", "", template.read_text()))
    marked, plain = (load("eval", folder, tmp_path) for folder in (TINY, tmp_path / "plain"))
    assert "generation %}" not in template.read_text()
    assert np.array_equal(marked.tokens, plain.tokens) and np.array_equal(marked.mask, plain.mask)


def test_tiny_files_load():
    from transformers import AutoConfig

    tokenizer, config = load_tokenizer(TINY, 2048), AutoConfig.from_pretrained(TINY, local_files_only=True)
    assert len(tokenizer) == config.vocab_size == 2048
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.convert_ids_to_tokens(config.bos_token_id) == "<|im_start|>"
    for messages in read("eval.jsonl") + [[{"content": "naïve café ☕ 数据\t\x00 end"}]]:
        text = messages[-1]["content"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not set(tokenizer.encode("<|im_end|>")) - {2}


def test_unigram_baseline(tmp_path):
    tiny = {name: load(name, TINY, tmp_path) for name in ("train", "eval")}
    assert 6 < unigram_nats(tiny["train"], tiny["eval"], 2048) < np.log(2048)

    def dataset(*tokens):
        stats = DataStats(1, 0, 0, len(tokens), len(tokens) - 1)
        mask = np.arange(len(tokens)) > 0
        arrays = np.array(tokens, np.int32), mask, np.array([0, len(tokens)]), np.array([[0, 1]], np.int32)
        return TokenDataset(*arrays, ("rows.jsonl",), stats, "")

    # Targets of train: 1, 1, 2; with one added to each of 4 ids, p(1) = 3/7 and p(3) = 1/7.
    assert unigram_nats(dataset(0, 1, 1, 2), dataset(2, 1, 3), 4) == pytest.approx(-np.log(3 / 49) / 2)


def test_documents_are_never_divided():
    """Between train and eval; each row stands in one of them, once."""
    rows = [
        make_tiny.Question(f"document {n}", f"question {n}.{k}", "x" * 60) for n in range(40) for k in range(1 + n % 30)
    ]
    train, held_out = make_tiny.split(rows)
    assert sorted(map(str, [*train, *held_out])) == sorted(map(str, rows)) and held_out
    assert not {row.document for row in train} & {row.document for row in held_out}
    assert all(sum(other.document == row.document for other in rows) <= 25 for row in held_out)


def test_passages_are_cut_at_paragraphs():
    """300 and 498 characters and the empty line between them are 800; one character more is a second passage."""
    assert [len(text) for text in make_tiny.passages("a" * 300 + "\n\n" + "b" * 498)] == [800]
    assert [len(text) for text in make_tiny.passages("a" * 300 + "\n\n" + "b" * 499)] == [300, 499]
    assert make_tiny.passages("c" * 801) == []
