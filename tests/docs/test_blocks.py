"""What README.md and docs/*.md tell a reader to type works as it is written.

A page's blocks run in order, in one working folder with the models and data that the page speaks of. Every fenced
block has a language: `sh` runs, `python` runs or becomes a file, `text` is a picture. A comment right before a block
says more:

    <!-- file: NAME -->         the block is a file that later blocks use
    <!-- exit status: N -->     that of its last command
    <!-- not run: REASON -->    it needs what this machine has not; a reader sees the reason in the page's source
    <!-- dry run: REASON -->    the same, and test_cluster.py runs it with stand-ins for a cluster's commands

Blocks of `make` lines install and train: `.ci/run` runs those.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.runs import warm
from support.suite.metrics_page import keys_of_runs, unexplained
from transformers import AutoModelForCausalLM, Qwen3Config

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "assets" / "tiny"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("sh", "python", "text")
MARKS = ("file", "exit status", "not run", "dry run")
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+): (?P<value>.+?) -->\n)?^```(?P<language>.*)\n(?P<text>(?:.*\n)*?)^```$", re.M
)
MAKE = re.compile(r"^make ([a-z-]+)", re.M)
WIDEST_LINE = 80  # characters in a block
END = 2  # the token that ends an answer


@dataclass(frozen=True)
class Block:
    """line: of its first fence, in its page."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    value: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_make(self) -> bool:
        """Of `make` alone: a block that mixes it with other commands would run in part only."""
        lines = [line for line in self.text.splitlines() if line and not line.startswith("#")]
        return self.language == "sh" and all(line.startswith("make ") for line in lines)

    @property
    def runs(self) -> bool:
        return self.language in ("sh", "python") and not self.mark.endswith(" run") and not self.is_make


def blocks_of(text: str, page: str) -> list[Block]:
    return [
        Block(
            page,
            text.count("\n", 0, m.start("language")) + 1,
            m["language"],
            m["text"],
            m["mark"] or "",
            m["value"] or "",
        )
        for m in BLOCK.finditer(text)
    ]


BLOCKS = {page.name: blocks_of(page.read_text(), page.name) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]


def test_every_block_is_found_and_has_a_language():
    for page in PAGES:
        text = page.read_text()
        assert text.count("```") == 2 * len(BLOCKS[page.name]), f"{page.name}: a fence that is indented or not closed"
        outside = BLOCK.sub("", text)
        assert "<!--" not in outside, f"{page.name}: a comment that is not right before a block"
        assert not re.search(r"^\n {4}\S", outside, re.M), f"{page.name}: an indented block; give it fences"
    assert {block.where: block.language for block in ALL if block.language not in LANGUAGES} == {}
    assert {block.where: block.mark for block in ALL if block.mark and block.mark not in MARKS} == {}


def test_a_line_of_a_block_fits_the_column_of_the_site():
    """But for a line that is one word."""
    lines = [(block.where, line) for block in ALL for line in block.text.splitlines()]
    wide = [(where, line) for where, line in lines if len(line) > WIDEST_LINE]
    assert [(where, line) for where, line in wide if len(line.removesuffix(" \\").split()) > 1] == []


def test_at_most_ten_blocks_are_not_run():
    assert len([block for block in ALL if block.mark == "not run"]) <= 10


def test_dry_runs_are_on_the_page_that_is_checked():
    assert {block.page for block in ALL if block.mark == "dry run"} == {"cluster.md"}


def test_continuous_integration_runs_every_make_command():
    """Of the blocks of every page, and of all that README names anywhere; `make test` as a part of `make test-all`."""
    targets = {target for block in ALL if block.is_make for target in MAKE.findall(block.text)}
    targets |= set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))
    run = set(MAKE.findall((ROOT / ".ci" / "run").read_text()))
    assert {"sft", "grpo", "dapo", "test"} <= targets and "test-all" in run and targets - {"test"} <= run


def test_make_and_other_commands_are_in_blocks_of_their_own():
    assert [block.where for block in ALL if MAKE.search(block.text) and not block.is_make] == []


def test_no_target_of_the_makefile_uses_a_variable_that_nobody_defined():
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[0].split()
    assert {"sft", "grpo", "dapo", "test"} <= set(targets)
    command = ["make", "--dry-run", "--warn-undefined-variables", *targets]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "undefined variable" not in told.stderr, told.stderr


def write_model(folder: Path) -> None:
    """A Hugging Face folder with random weights, whose answers end after ten tokens on average.

    The first number of every hidden state is far larger than the others, so a single weight of the output decides how
    likely the end is.
    """
    config = json.loads((TINY / "config.json").read_text())
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    more = {"intermediate_size": 48, "max_position_embeddings": 8192, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**config | small | more))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[END, 0] = 1.0  # of a logit of sqrt(32) = 5.7: a chance of 0.1 against 2047 of about 0
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Path:
    """A folder with the programs that blocks start modules by."""
    folder, descriptor = tmp_path_factory.mktemp("commands"), warm.start_server().fileno()
    for name, module in (("python", ""), ("torchrun", f"-m {warm.LAUNCHER}")):
        start = f"{sys.executable} -S {Path(__file__).with_name('warm_command.py')} {descriptor} {module}"
        (folder / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """What a reader is expected to have: a model, rows, and the repository's `recipes` in the working folder."""
    folder = tmp_path_factory.mktemp("prepared")
    write_model(folder / "DIR")
    sums = [(f"What is {n} plus {n}?", f"{2 * n}") for n in range(72)]
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"It is {a}."}]} for q, a in sums
    ]
    prompts = [{"prompt": q, "answer": a} for q, a in sums]
    files = {"train": chats[:64], "eval": chats[64:], "prompts": prompts[:32], "held_out": prompts[64:]}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(block: Block, folder: Path, commands: Path) -> str:
    """The block's standard output; fails where its exit status is not the one that the page says."""
    if block.mark == "file":
        (folder / block.value).write_text(block.text)
        return ""
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-e", "-c", block.text] if block.language == "sh" else ["python", "-c", block.text]
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    connection = [warm.start_server().fileno()]
    done = subprocess.run(command, cwd=folder, env=environment, pass_fds=connection, capture_output=True, text=True)
    wanted = int(block.value) if block.mark == "exit status" else 0
    assert done.returncode == wanted, f"{block.where} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if any(block.runs for block in blocks)])
def test_the_blocks_of_a_page_run_in_order(page, prepared, commands, tmp_path):
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    told = {block.text: run(block, folder, commands) for block in BLOCKS[page] if block.runs}
    assert unexplained(keys_of_runs(folder / "runs")) == set(), "docs/reading_a_run.md explains every metric"
    if page == "README.md":
        check_own_loop(next(lines for command, lines in told.items() if "python own_loop.py" in command))


def check_own_loop(told: str) -> None:
    """README: two ranks give the numbers of one: the loss and gradient norm of three steps."""
    # Records and not lines: two ranks can end one line together.
    records = re.findall(r"loss .*?(?:True|False)", told)
    numbers = [[float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", record)] for record in records]
    alone, together = numbers[:3], numbers[3:]
    assert [len(record) for record in alone] == [2, 2, 2] and len(together) == 6, told
    for record in together:
        assert any(record == pytest.approx(other, rel=1e-5) for other in alone), told
