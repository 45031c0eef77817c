"""Mixtures: which source and which row a draw is, against the apportionment seat by seat in exact fractions."""

from fractions import Fraction
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.runs.runs import write_rows

from isoloss.engine.config.data_config import WeightedFile
from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import BatchConfig, Config, DataConfig, ModelConfig, TrainConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import draw_indices, load_dataset, step_indices
from isoloss.engine.data.mixture import Mixture, content
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RLDataConfig
from isoloss.engine.rl.prompts import PromptSet, load_prompts
from isoloss.engine.rl.report import banner
from isoloss.engine.rl.trajectory import Prompt
from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes.launch import RECIPES, compose_config

TINY = str(files("isoloss.recipes") / "assets" / "tiny")


def mixture(sizes, weights) -> Mixture:
    return Mixture(tuple(f"{n}.jsonl" for n in range(len(sizes))), tuple(sizes), tuple(map(float, weights)))


def webster(weights, seats) -> list[int]:
    """Seat after seat to the largest weight / (2 seats so far + 1), the first of equals."""
    counts, order = [0] * len(weights), []
    for _ in range(seats):
        source = max(range(len(weights)), key=lambda s: (Fraction(weights[s]) / (2 * counts[s] + 1), -s))
        counts[source] += 1
        order.append(source)
    return order


WEIGHTS = st.lists(st.integers(1, 64), min_size=1, max_size=5)


@given(weights=WEIGHTS, start=st.integers(0, 90), count=st.integers(1, 40))
def test_sources_are_those_of_the_apportionment(weights, start, count):
    # Of powers of two in all, so that shares are exact and ties are ties.
    weights = [*weights, 512 - sum(weights)]
    parts, expected = mixture([7] * len(weights), weights), webster(weights, start + count)
    sources, numbers = parts.sources(start, count)
    assert sources.tolist() == expected[start:]
    assert numbers.tolist() == [expected[:i].count(s) for i, s in enumerate(expected)][start:]
    assert list(parts.counts(start + count)) == [expected.count(s) for s in range(len(weights))]


@pytest.mark.parametrize("weights", [(3, 1), (0.7, 0.2, 0.1), (1, 1e-3), (1, 1, 1), (5, 3, 2, 1, 1)])
def test_shares_hold_over_every_beginning(weights):
    """To a draw and a half over short runs, and to 1e-3 over long ones; far into a run as at its beginning."""
    parts, shares = mixture([5] * len(weights), weights), np.array(weights) / sum(weights)
    drawn = np.eye(len(weights))[parts.sources(0, 4000)[0]].cumsum(0)
    off = np.abs(drawn - shares * np.arange(1, 4001)[:, None])
    assert off.max() <= 1.5 and (off[-1] / 4000).max() < 1e-3
    far = 3_000_000_000
    before, after = parts.counts(far), parts.counts(far + 64)
    assert sum(before) == far and np.abs(np.array(before) - far * shares).max() <= 1.5
    counted = np.bincount(parts.sources(far, 64)[0], minlength=len(weights))
    assert (np.array(after) - before).tolist() == counted.tolist()


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4), seed=st.integers(0, 5), size=st.integers(1, 7))
def test_every_source_is_permuted_anew_each_epoch_of_its_own(sizes, seed, size):
    """However the stream is cut into steps."""
    parts = mixture(sizes, range(1, len(sizes) + 1))
    stream = draw_indices(parts, 0, 12 * size, seed)
    steps = [step_indices(parts, step, size, seed) for step in range(12)]
    assert stream.dtype == np.int64 and np.array_equal(np.concatenate(steps), stream)
    before = 0
    for source, rows in enumerate(sizes):
        drawn = [row - before for row in stream.tolist() if before <= row < before + rows]
        for epoch in range(len(drawn) // rows + 1):
            expected = np.random.default_rng([seed, epoch, source]).permutation(rows).tolist()
            assert drawn[epoch * rows : (epoch + 1) * rows] == expected[: len(drawn) - epoch * rows]
        before += rows


def test_a_mixture_of_one_file_is_the_file():
    assert np.array_equal(draw_indices(mixture([11], [0.3]), 5, 40, 3), draw_indices(11, 5, 40, 3))


def rows(name, count):
    return [{"text": f"one two three {name} {number}", "prompt": f"{name} {number}"} for number in range(count)]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 6), ("b", 3)):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": row["text"]} for row in rows(name, count)])
        write_rows(tmp_path / f"{name}_prompts.jsonl", [{"prompt": row["prompt"]} for row in rows(name, count)])
    write_rows(tmp_path / "long.jsonl", [{"text": "one two three " * 200}])

    def data(*files, **options):
        weighted = tuple(WeightedFile(*file) for file in files)
        return DataConfig(train=weighted, overlong="drop", max_length=100, **options)

    return data


def test_rows_and_prompts_come_from_their_files(data, tmp_path):
    given = ("a.jsonl", 1.0), ("b.jsonl", 3.0)
    dataset = load_dataset(data(*given), "train", TINY, vocab_size=2048, cache_dir=tmp_path)
    prompts = load_prompts(
        data(*((name.replace(".", "_prompts."), weight) for name, weight in given)),
        "train", load_tokenizer(TINY, 2048), max_prompt_tokens=50,
    )  # fmt: skip
    assert dataset.mixture and (dataset.mixture.sizes, dataset.mixture.weights) == ((6, 3), (1.0, 3.0))
    taken = [dataset[int(row)].id for row in step_indices(dataset.order, 0, 8, 0)]
    assert [taken.count(f"a.jsonl:{n}") for n in range(1, 7)].count(1) == 2
    assert {f"b.jsonl:{n}" for n in range(1, 4)} < set(taken)
    assert [prompts.prompts[row].id.replace("_prompts", "") for row in step_indices(prompts.order, 0, 8, 0)] == taken
    with pytest.raises(UserError, match=r"data.train: long.jsonl has a weight of 2, but no row of it is left"):
        load_dataset(data(("a.jsonl", 1.0), ("long.jsonl", 2.0)), "train", TINY, vocab_size=2048, cache_dir=tmp_path)


def test_what_a_resumed_run_must_not_change(data, tmp_path):
    """Proportions of weights count, not their sum; where one file ends; and whether there are weights."""
    first = mixture([6, 3], [3, 1])
    others = mixture([6, 3], [1, 3]), mixture([5, 4], [3, 1]), None
    assert content("f", first) == content("f", mixture([6, 3], [6, 2])) == "f as 6 rows x 0.75 + 3 rows x 0.25"
    assert content("f", first) not in [content("f", other) for other in others] and content("f", None) == "f"


def test_what_the_banner_tells():
    assert mixture([60, 5], [3, 1]).lines(100, "row") == [
        "mixture: 0.jsonl: 60 rows, weight 3, 75.00% of the rows drawn, 75 in this run: 1.25 epochs",
        "mixture: 1.jsonl: 5 rows, weight 1, 25.00% of the rows drawn, 25 in this run: 5.00 epochs",
    ]


@pytest.mark.parametrize(("dynamic", "bound"), [(False, ""), (True, "at least ")])
def test_the_banner_of_reinforcement_learning_counts_prompts_of_batches(one_rank, dynamic, bound):
    """Ten steps are five batches of eight prompts. Dynamic sampling draws more where it drops groups."""
    algorithm = AlgorithmConfig(minibatches=2, dynamic_sampling=dynamic)
    config = RLConfig(ModelConfig("m"), data=RLDataConfig(("p",)), batch=BatchConfig(8), algorithm=algorithm)
    prompts = PromptSet((Prompt("p:1", (1,), "a", None, "p"),), mixture=mixture([60, 5], [3, 1]))
    rejects = SimpleNamespace(lines=lambda _: [])
    data: Any = SimpleNamespace(train=prompts, eval=None, rejects=lambda _: rejects)
    run: Any = SimpleNamespace(output_dir="here", total_steps=10, banner=lambda weights, lines, work: lines)
    assert [line.partition("drawn, ")[2] for line in banner(config, data, run) if line.startswith("mixture")] == [
        f"{bound}30 in this run: 0.50 epochs",
        f"{bound}10 in this run: 2.00 epochs",
    ]


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
@pytest.mark.parametrize(
    "written",
    [
        "[{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 0.5}]",
        "[{path:a.jsonl,weight:3},{path:b.jsonl,weight:0.5}]",
    ],
)
def test_on_a_command_line_and_as_printed(recipe, written):
    cls = RECIPES[recipe].config
    words = ["model.path=m", f"data.train={written}", "train.steps=3", "preset=plain"]
    words += ["reward.function=[math]"] if recipe == "grpo" else []
    config, values, _ = compose_config(recipe, cls, words)
    assert config.data.train == (WeightedFile("a.jsonl", 3.0), WeightedFile("b.jsonl", 0.5))
    assert build(cls, yaml.safe_load(yaml.safe_dump(values))) == config


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ([{"path": "a", "weight": 0}], r"data.train: weight of a=0.0 must be positive and finite"),
        ([{"path": "a", "weight": "inf"}], r"data.train: weight of a=inf must be positive and finite"),
        ([{"path": "a", "weight": float("nan")}], r"weight of a=nan must be positive"),
        ([{"path": "a", "weight": -1}, "b"], r"weight of a=-1.0 must be positive"),
        ([{"path": "a", "weight": 1}, "b"], r"data.train=\['b'\] has no weight, as others have: write {path: FILE"),
        ([{"path": "a", "weight": 1}, {"path": "./a", "weight": 2}], r"data.train=\['a', './a'\] is one file twice"),
        ([{"path": "a", "wieght": 1}], r"unknown key 'data.train.wieght'; did you mean 'data.train.weight'"),
        ([{"path": "a"}], r"data.train.weight is missing"),
    ],
)
def test_mistakes(train, said):
    with pytest.raises(UserError, match=said):
        build(DataConfig, {"train": train}, "data.")


def test_weights_need_steps_and_are_for_training():
    train = (WeightedFile("a", 1.0),)
    says = r"train.steps=None must be a number with weights in data.train"
    with pytest.raises(UserError, match=says):
        Config(model=ModelConfig("m"), data=DataConfig(train=train), train=TrainConfig())
    with pytest.raises(UserError, match=says):
        RLConfig(model=ModelConfig("m"), data=RLDataConfig(train=train), train=TrainConfig())
    with pytest.raises(UserError, match=r"data.eval=.* must be text"):
        build(DataConfig, {"eval": [{"path": "a", "weight": 1}]}, "data.")
