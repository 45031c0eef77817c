"""Ranks that were given different things end before the first step, and say what differs and on which ranks."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.runs import rl_runs, warm
from support.runs.runs import typed, write_model
from support.runs.waiting import LONG

from isoloss.engine.config.schema import CheckpointConfig, Config, ModelConfig
from isoloss.engine.run.folder import Fingerprint
from isoloss.engine.run.rank_agreement import (
    SAMPLE_BYTES,
    checkpoint_fingerprints,
    configuration_fingerprints,
    difference,
    function_fingerprints,
    model_fingerprints,
    sample,
    spans,
)
from isoloss.engine.step.model_source import resolve
from isoloss.models.lora.config import LoraConfig

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def two_ranks(recipe: str, words: list[str], tmp_path: Path) -> str:
    """The one line of a run of two ranks, which has written nothing but the cache of its rows."""
    done = warm.run(
        [*TORCHRUN, "-m", f"isoloss.recipes.{recipe}", *typed(*words)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        timeout=LONG,
    )
    assert done.returncode == 1 and "exitcode  : 2" in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("isoloss: ")]
    assert not Path("out").exists()
    return line


def test_a_rank_with_other_rows(inputs, arguments, tmp_path):
    """As many rows, in a file of the same name on another node."""
    rows = (inputs / "rows.jsonl").read_text()
    for rank, text in enumerate((rows, rows.replace("What is 5", "What's 5"))):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}/train.jsonl").write_text(text)
    line = two_ranks("sft", [*arguments, f"data.train=[{tmp_path}/node${{oc.env:RANK}}/train.jsonl]"], tmp_path)
    assert "the content of data.train is " in line and " on rank 0, " in line and " on rank 1: a file of" in line


def test_a_rank_with_another_loss(tmp_path, monkeypatch):
    inputs = rl_runs.write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    for rank, sign in enumerate("-+"):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}/own.py").write_text(
            f"def loss(inputs, algorithm):\n    return {sign}inputs.logprobs_N\n"
        )
    (tmp_path / "link0").symlink_to("node0")
    (tmp_path / "link1").symlink_to("node1")
    words = [*rl_runs.overrides_of(inputs, "out"), "algorithm.loss=link${oc.env:RANK}/own.py:loss"]
    line = two_ranks("grpo", words, tmp_path)
    assert "algorithm.loss is 'link0/own.py:loss' on rank 0, 'link1/own.py:loss' on rank 1: this key differs" in line
    assert line.endswith("; 1 more differ, such as the file of algorithm.loss; give all the same")


@pytest.fixture
def model(tmp_path) -> Path:
    folder = write_model(tmp_path / "model", num_layers=2)
    return folder


def differing(one: list[Fingerprint], other: list[Fingerprint]) -> list[str]:
    assert [each.name for each in one] == [each.name for each in other]
    return [each.name for each, again in zip(one, other) if each.value != again.value]


def test_every_key_is_compared_but_for_paths_of_a_node(model):
    config = Config(ModelConfig(str(model), from_scratch=True))
    elsewhere = replace(config, model=replace(config.model, path="/elsewhere"))
    elsewhere = replace(elsewhere, data=replace(config.data, train=("/elsewhere/rows.jsonl",), cache_dir="/scratch"))
    assert differing(configuration_fingerprints(config), configuration_fingerprints(elsewhere)) == []
    other = replace(
        config,
        train=replace(config.train, seed=config.train.seed + 1),
        optim=replace(config.optim, lr=0.125),
        parallel=replace(config.parallel, tp=2),
        data=replace(config.data, max_length=77),
    )
    assert differing(configuration_fingerprints(config), configuration_fingerprints(other)) == [
        "data.max_length", "parallel.tp", "optim.lr", "train.seed",
    ]  # fmt: skip


def test_what_a_model_folder_holds_is_compared(model, tmp_path):
    config = Config(ModelConfig(str(model), from_scratch=True))
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    other = Config(ModelConfig(str(copy), from_scratch=True))
    source = resolve(config)
    assert differing(model_fingerprints(config, source), model_fingerprints(other, resolve(other))) == []
    (copy / "chat_template.jinja").write_text((copy / "chat_template.jinja").read_text() + " ")
    assert differing(model_fingerprints(config, source), model_fingerprints(other, resolve(other))) == ["the tokenizer"]
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | {"rope_theta": 7.0}))
    assert "the architecture of model.path" in differing(
        model_fingerprints(config, source), model_fingerprints(other, resolve(other))
    )


def test_the_adapter_that_training_begins_with_is_compared(model, tmp_path):
    """Copies in folders of one name, on two nodes."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    config = Config(ModelConfig(str(model), from_scratch=True))
    source, config = resolve(config), replace(config, lora=LoraConfig(rank=2, init=str(adapter)))
    found = []
    for value in (0.0, 0.0, 1.0):
        save_file({"a": torch.full((2, 2), value)}, adapter / "adapter_model.safetensors")
        found.append(model_fingerprints(config, source))
    assert differing(found[0], found[1]) == [] and differing(found[1], found[2]) == ["the adapter of lora.init"]


def test_weights_are_sampled_from_end_to_end(tmp_path):
    """A file of the same size with other numbers at its beginning, in between, or in its last."""
    path, numbers = tmp_path / "model.safetensors", torch.arange(40_000, dtype=torch.float32)
    seen = set()
    for place in (None, 0, 20_000, 39_999):
        changed = numbers.clone()
        if place is not None:
            changed[max(0, place - 5000) : place + 5000] += 1.0
        save_file({"a": changed}, path)
        seen.add(sample(path))
    assert len(seen) == 4 and path.stat().st_size > 16 * SAMPLE_BYTES
    path.write_bytes(b"x")  # of less than one sample
    assert sample(path) not in seen


def test_texts_of_functions_are_compared_where_they_are_files(tmp_path):
    (tmp_path / "own.py").write_text("def reward(): return 1\n")
    functions = {"algorithm.loss": "clip", "reward.function[0]": f"{tmp_path}/own.py:reward", "x": "package.module:f"}
    (before,) = function_fingerprints(functions)
    (tmp_path / "own.py").write_text("def reward(): return 2\n")
    (after,) = function_fingerprints(functions)
    assert before.name == after.name == "the file of reward.function[0]"
    assert before.value != after.value
    (tmp_path / "own.py").unlink()  # on another node, which calls no rewards
    assert function_fingerprints(functions) == []


def test_checkpoints_are_those_of_a_shared_folder(tmp_path):
    config = Config(ModelConfig("m"), output_dir=str(tmp_path))
    assert checkpoint_fingerprints(config, "sft") == []
    config = replace(config, checkpoint=CheckpointConfig(resume=True))
    assert checkpoint_fingerprints(config, "sft")[0].value == "empty"
    for name in ("step_00000002", "step_00000010", "step_best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint_fingerprints(config, "sft")[0].value == "step_00000010, step_00000002"


def test_the_ranks_of_each_value_are_named():
    of = lambda **values: [Fingerprint(name, value, f"a file of {name}") for name, value in values.items()]
    same = [of(rows="a", words="b")] * 4
    assert difference(same) is None
    odd = [*same, of(rows="c", words="b"), of(rows="a", words="b")]
    assert difference(odd) == (
        "the ranks were given different things: rows is a on ranks 0-3, 5, c on rank 4: a file of rows differs; "
        "give all the same"
    )
    absent = difference([of(rows="a"), of(rows="b", words="c")])
    assert absent is not None and absent.endswith("; 1 more differ, such as words; give all the same")
    assert "words is absent on rank 0, c on rank 1: a file of words" in str(difference([[], of(words="c")]))


@pytest.mark.parametrize(
    ("ranks", "text"), (([0], "0"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 5, 6], "1, 3, 5-6")), ids=str
)
def test_spans(ranks, text):
    assert spans(ranks) == text
