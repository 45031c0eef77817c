"""Fixtures of the whole suite: ranks, tiny models, and runs of whole recipes that take seconds. tests/conftest.py
registers them."""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from isoloss.parallel import mesh
from isoloss.parallel.runtime import process_group as ranks
from isoloss.recipes import launch
from isoloss.tools.prove.rank_pool import MAX_THREADS, WorkerPool, collect_garbage
from support.models import families, plain_megatron
from support.ranks.te_pool import TransformerEnginePool
from support.runs.runs import conversation, write_model, write_rows
from support.suite import covered

covered.measure_ranks()


def pytest_collection_finish() -> None:
    collect_garbage()  # later collections search nothing of what is imported by now


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """What a recipe run in this process leaves behind goes, before its threads slow down all other tests."""
    yield
    if psutil.Process().num_threads() > MAX_THREADS:
        mesh.destroy()
        collect_garbage()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight ranks at most, started when a test first needs them and kept to the end of the session.

    What they run must be importable by name: put it into `tests/support`.
    """
    with WorkerPool(8, caller=lambda: f"in {os.environ.get('PYTEST_CURRENT_TEST')}") as workers:
        yield workers


@pytest.fixture(scope="session")
def te_pool() -> Iterator[TransformerEnginePool]:
    """Four ranks at most, for which a stand-in for Transformer Engine imports."""
    with TransformerEnginePool(4) as workers:
        yield workers


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone, left again after the test."""
    ranks.init_process_group()
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    mesh.destroy()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory) -> Callable[..., Path]:
    """tiny_hf(name of a model, **changes of its configuration) -> a Hugging Face folder, not to be written to."""
    written: dict[str, Path] = {}

    def of(name: str, **changes: Any) -> Path:
        key = f"{name} {sorted(changes.items())}"
        if key not in written:
            written[key] = families.write_folder(name, tmp_path_factory.mktemp("hf"), **changes)
        return written[key]

    return of


@pytest.fixture(scope="session")
def deep_hf(tiny_hf) -> Callable[..., Path]:
    """The same of four layers: two a pipeline stage."""
    return partial(tiny_hf, num_hidden_layers=4)


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory, pool) -> Callable[..., Path]:
    """plain_checkpoint(hf, world, **options) -> a checkpoint of plain Megatron-Core, not to be written to."""
    written: dict[str, Path] = {}

    def of(hf: Path, world: int = 1, **options: Any) -> Path:
        key = f"{hf} {world} {sorted(options.items(), key=str)}"
        if key not in written:
            folder = tmp_path_factory.mktemp("mcore") / "checkpoint"
            pool.run(world, plain_megatron.save_as, hf, folder, options)
            written[key] = folder
        return written[key]

    return of


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """A folder with `model` (config.json and tokenizer, no weights) and `rows.jsonl` (12 short conversations)."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "model", num_layers=4)
    rows = [conversation(f"What is {n} plus {n}?", f"{n} plus {n} is {n + n}." + " Yes." * (n % 5)) for n in range(12)]
    write_rows(folder / "rows.jsonl", rows)
    return folder


@pytest.fixture
def arguments(inputs, tmp_path, monkeypatch) -> list[str]:
    """Overrides for a run of two steps in the empty folder `tmp_path/work`, which becomes the
    working directory."""
    # Python collects: a collection before each run searches all that the tests have imported, which takes longer than
    # the run.
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return [
        f"model.path={inputs}/model",
        "model.from_scratch=true",
        f"data.train={inputs}/rows.jsonl",
        "data.eval=[]",
        "data.max_length=128",
        "batch.global_size=4",
        "batch.max_tokens=256",
        "train.steps=2",
        "train.gc_every=0",
        "output_dir=out",
    ]


@pytest.fixture(scope="session")
def sorter(tmp_path_factory) -> Path:
    """A folder with `hf`, a model that sorts three letters of a to f as a careless demonstrator taught it, and with the
    120 problems that there are, as `rl.jsonl` and `eval.jsonl`."""
    folder, chance = tmp_path_factory.mktemp("sorter"), random.Random(0)
    problems = ["".join(letters) for letters in itertools.permutations("abcdef", 3)]

    def row(problem: str, **more: str) -> dict:
        return {"prompt": [{"role": "user", "content": f"Sort the letters: {problem}"}], **more}

    def careless(problem: str) -> str:
        first, second, third = sorted(problem)
        return first + (third + second if chance.random() < 0.65 else second + third)

    demonstrations = [row(problem, completion=careless(problem)) for _ in range(16) for problem in problems]
    data = write_rows(folder / "sft.jsonl", demonstrations)
    for name in ("rl.jsonl", "eval.jsonl"):
        write_rows(folder / name, [row(problem, answer="".join(sorted(problem))) for problem in problems])
    short = ["train.steps=150", "batch.global_size=32", "optim.lr=3e-3", "optim.warmup_steps=5"]
    argv = ["preset=sort", f"data.train={data}", *short, f"output_dir={folder}/sft"]
    assert launch.main("sft", argv) == 0
    return (folder / "sft" / "hf").rename(folder / "hf").parent
