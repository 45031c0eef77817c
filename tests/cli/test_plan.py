"""What isoloss.tools.plan tells of a run: its memory, its exchanges, its data file, and a generated batch."""

import dataclasses
import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.ranks import groups
from support.runs import warm
from support.runs.runs import TINY, conversation, write_model, write_rows
from transformers import AutoTokenizer

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.limits import GIB
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import Layout
from isoloss.recipes.launch import compose_config
from isoloss.tools.plan import __main__ as plan
from isoloss.tools.plan import picture, stages, tables
from isoloss.tools.plan.data_file import DataPlan, plan_data
from isoloss.tools.plan.estimate import Estimate
from isoloss.tools.plan.hardware import GPUS
from isoloss.tools.plan.report import Exchange, PhaseReport, RankReport
from isoloss.tools.plan.rollout_batch import estimate_batch
from isoloss.tools.plan.tables import batch_lines, data_table, exchange_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    write_model(folder / "model", 2)
    return folder


@pytest.fixture(autouse=True)
def warm_dry_runs(monkeypatch):
    monkeypatch.setattr(stages, "subprocess", SimpleNamespace(run=warm.run, DEVNULL=subprocess.DEVNULL))


# ---- the data file ---------------------------------------------------------------------------------------------------


def planned(folder, rows, recipe, world, *keys) -> tuple[DataPlan, Config]:
    write_rows(folder / "rows.jsonl", rows)
    given = [f"model.path={folder / 'model'}", f"data.train={folder / 'rows.jsonl'}", f"data.cache_dir={folder}", *keys]
    config = compose_config(recipe, RLConfig if recipe == "grpo" else Config, given)[0]
    layout = config.parallel.layout().with_world(world)
    return plan_data(config, read_architecture(config.model.path), layout), config


def tokens_of(text: str) -> int:
    return len(AutoTokenizer.from_pretrained(TINY)(text)["input_ids"]) + 1  # the end token


def test_equal_rows_are_divided_evenly(folder):
    """Eight rows of n tokens in micro-batches of 2 n: two on each of two ranks, all full."""
    text = "a b c d e f g h i j k l"
    n = tokens_of(text)
    keys = ("batch.global_size=8", f"batch.max_tokens={2 * n}", "data.max_length=64")
    found, _ = planned(folder, [{"text": text}] * 8, "sft", 2, *keys)
    assert (found.rows, found.tokens, found.longest, found.over_budget) == (8, 8 * n, n, 0)
    assert found.micro_batches == (2, 2) and found.filled == pytest.approx(1) and found.imbalance == (1, 1)
    assert found.histogram == [(32 if n > 16 else 16, 8)]


def test_unequal_rows_are_counted_by_length(folder):
    """One row costs more than all the others of its step: its rank is the costliest, by more than a half."""
    texts = ["a b", "c d", "e f", " ".join("abcdefghij" * 12)]
    lengths = np.array([tokens_of(text) for text in texts])
    keys = ("batch.global_size=4", "batch.max_tokens=64", "data.max_length=100", "data.overlong=truncate")
    found, config = planned(folder, [{"text": text} for text in texts], "sft", 2, *keys)
    kept = np.minimum(lengths, 100)
    assert lengths[3] > 100 and (found.truncated, found.dropped, found.tokens) == (1, 0, kept.sum())
    counted, _ = np.histogram(kept, bins=[0, *(high + 0.5 for high, _ in found.histogram)])
    assert [rows for _, rows in found.histogram] == list(counted) and found.histogram[-1] == (128, 1)
    assert found.over_budget == 1 and found.longest == 100 and found.imbalance[1] > 1.5

    table = data_table(found, config, Layout(dp=2)).splitlines()
    assert table[0] == f"data: 4 rows of {kept.sum()} tokens, 1 truncated"
    bars = [line.count("#") for line in table[1 : 1 + len(found.histogram)]]
    assert bars == [round(40 * rows / 3 + 0.49) for _, rows in found.histogram]
    assert "1 rows exceed batch.max_tokens=64, the longest with 100 tokens" in table[-1]


def test_completions_are_planned_at_their_full_length(folder):
    """Two prompts a batch, four completions of each in two steps: four sequences a step, on one rank."""
    rows = [{"prompt": "a b c", "answer": "a"}] * 4
    prompt = tokens_of("a b c") - 1
    n = prompt + 6
    keys = ["batch.global_size=2", f"batch.max_tokens={2 * n}", "rollout.num_generations=4", "rollout.max_new_tokens=6"]
    keys += ["algorithm.minibatches=2", "data.max_length=64", "reward.function=exact_match"]
    found, _ = planned(folder, rows, "grpo", 1, *keys)
    assert (found.rows, found.tokens, found.longest) == (4, 4 * prompt, n)
    assert found.micro_batches == (2, 2) and found.filled == pytest.approx(1)


# ---- a generated batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colocated", [True, False])
def test_seconds_of_a_batch_are_those_worked_out_by_hand(colocated, folder):
    keys = ["rollout.backend=sglang", "rollout.servers=[http://a:1,http://b:1]", f"rollout.colocated={colocated}"]
    keys += ["batch.global_size=16", "rollout.num_generations=4", "rollout.max_new_tokens=100", "data.max_length=200"]
    keys += ["reward.function=exact_match", "rollout.concurrency=16", "algorithm.minibatches=2", "data.train=[x]"]
    keys += ["rollout.weight_sync=tensor" if colocated else "rollout.weight_sync=broadcast"]
    config = compose_config("grpo", RLConfig, [f"model.path={folder / 'model'}", *keys])[0]
    arch, gpu = read_architecture(folder / "model"), GPUS["h100"]
    found = estimate_batch(config, arch, Layout(dp=4), [], Estimate(1, 3.0, 1.0, 1.0), gpu)

    servers = 4 if colocated else 2
    running = 16 // servers  # of 64 completions, no more at a time than rollout.concurrency on all servers
    assert (found.servers, found.server_gpus, found.running) == (servers, 1, running)
    (layer, _), h, vocab, layers = arch.layers, arch.hidden_size, arch.vocab_size, 2
    matrices = layers * (h * (4 + 2 * 2) * 8 + 4 * 8 * h + 3 * h * layer.mlp.width)
    norms = layers * (2 * h + (2 * 8 if layer.attention.qk_norm else 0)) + h
    weights = 2 * (matrices + norms + vocab * h * (1 if arch.tie_embeddings else 2))
    cache = running * (layers * 2 * 2 * 8 * 2) * 150  # half of the completions are written, on the average
    token = (weights + cache) / (0.8 * gpu.bandwidth)
    assert found.generate == pytest.approx(64 / (servers * running) * 100 * token, rel=1e-6)
    assert found.train == 2 * 3.0 and found.logprobs == 0
    assert found.sync == pytest.approx(0 if colocated else weights / (0.8 * gpu.infiniband))
    line = batch_lines(found)
    assert line.startswith(f"a generated batch: {found.seconds:.0f} s = generate") and "train 6 " in line


# ---- tables and picture ----------------------------------------------------------------------------------------------


def report(*exchanges: Exchange) -> RankReport:
    phase = PhaseReport("step", GIB, 0, "", {"weights": GIB}, {}, {}, {}, {}, {}, [], exchanges)
    return RankReport(0, 0, 1, 1, 8, [phase])


def test_the_largest_exchanges_come_first_and_those_with_oneself_not_at_all():
    small = Exchange("allreduce_", "dp", 4, 1, "float32", "a.py:1", 3, 10**9)
    large = Exchange("_allgather_base_", "tp", 2, 1, "bfloat16", "b.py:2", 7, 5 * 10**9)
    alone = Exchange("allreduce_", "pp", 1, 1, "float32", "c.py:3", 1, 9 * 10**9)
    lines = exchange_table([report(small, large, alone)]).splitlines()
    assert lines[0] == "largest exchanges of stage 0, 2 kinds in all:" and len(lines) == 4
    assert lines[2].split()[:6] == ["5.00", "7", "tp", "2", "1", "bfloat16"]
    assert lines[2].endswith("_allgather_base_ in step, b.py:2") and lines[3].split()[0] == "1.00"
    assert exchange_table([report(alone)]) == "no exchange with other ranks"


@pytest.mark.parametrize("layout", ["tp2+pp2+dp2", "ulysses2+ring2+dp2", "pp4+dp2"])
def test_ranks_stand_where_megatron_puts_them(layout, pool):
    layout = Layout.parse(layout)
    for rank, members in enumerate(pool.run(8, groups.members, layout)):
        assert picture.place(rank, layout) == (members["pp"].index(rank), members["dp"].index(rank))


@pytest.mark.parametrize(
    ("largest", "most", "unit", "top", "shown"),
    [
        (170 << 20, 74 * GIB, "MiB", 187.0, False),  # a small model fills its frame
        (55 * GIB, 74 * GIB, "GiB", 81.4, True),
        (90 * GIB, 74 * GIB, "GiB", 99.0, True),  # what does not fit passes the line
        (10 * GIB, 74 * GIB, "GiB", 11.0, False),
    ],
)
def test_the_axis_fits_what_it_shows(largest, most, unit, top, shown):
    scale = picture.scale_of(largest, most)
    assert (scale.unit, scale.shown) == (unit, shown) and scale.top == pytest.approx(top)
    assert ("74.0 fit" in scale.label()) == shown and ("of 74.0 GiB" in scale.label()) != shown


def test_a_small_model_has_a_size():
    sizes = {0: "0.0", GIB // 2048: "0.0005", GIB // 25: "0.0400", GIB // 10: "0.1", 3 * GIB // 2: "1.5"}
    assert {nbytes: tables.gib(nbytes) for nbytes in sizes} == sizes


def test_a_picture_says_whose_plan_it_is(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, dpi: figures.append(figure))
    of_stages = [dataclasses.replace(report(), stage=stage) for stage in range(2)]
    picture.draw(of_stages, Layout.parse("pp2+dp2"), 4 * GIB, "sft of mine on 4 x H100", tmp_path / "plan.png")
    (figure,) = figures
    memory, phases, ranks = figure.axes
    assert figure.get_suptitle() == "sft of mine on 4 x H100, layout pp2+dp2"
    assert memory.get_ylim() == phases.get_ylim() == (0, pytest.approx(1.1))
    assert [text.get_text() for text in ranks.texts] == ["rank 0, dp 0", "rank 1, dp 1", "rank 2, dp 0", "rank 3, dp 1"]
    # A single node is a strip, not half of the picture.
    assert ranks.get_subplotspec().get_gridspec().get_height_ratios()[1] < 1.1


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_plan_from_the_command_line(folder, capsys):
    rows = write_rows(folder / "talk.jsonl", [conversation("what", "that")] * 8)
    keys = [f"model.path={folder / 'model'}", f"data.train={rows}", f"data.cache_dir={folder}", "batch.max_tokens=256"]
    files = ["--json", str(folder / "plan.json"), "--picture", str(folder / "plan.png")]
    given = ["sft", *keys, "parallel.pp=2", "train.precision=bf16", "data.max_length=128"]
    assert plan.main([*given, "--gpus", "4", *files]) == 0
    out = capsys.readouterr().out
    assert "layout pp2+dp2" in out and "fits" in out and "data: 8 rows" in out and "estimate: " in out
    saved = json.loads((folder / "plan.json").read_text())
    assert saved["fits"] and [stage["stage"] for stage in saved["stages"]] == [0, 1] and saved["data"]["rows"] == 8
    # Of the weights by hand: the embedding and a layer, and a layer, the last norm and the output.
    arch = read_architecture(folder / "model")
    for stage in saved["stages"]:
        (weights,) = {phase["peak_kinds"]["weights"] for phase in stage["phases"]}
        assert weights == pytest.approx(2 * stage["parameters"], rel=0.05)
    of_both = sum(stage["parameters"] for stage in saved["stages"])
    assert of_both > arch.vocab_size * arch.hidden_size * 2
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_has_status_1(folder, capsys, monkeypatch):
    monkeypatch.setitem(GPUS, "a100", dataclasses.replace(GPUS["a100"], memory=GIB))
    given = [f"model.path={folder / 'model'}", "train.precision=bf16", "batch.max_tokens=64", "data.max_length=64"]
    assert plan.main(["sft", *given, "--gpus", "1", "--gpu", "a100"]) == 1
    out = capsys.readouterr().out
    assert "TOO MUCH" in out and "to fit: weights, gradients and optimizer alone take" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--json", "not/there/plan.json"], "--json=not/there/plan.json must be a file in a folder that exists"),
        (["--picture", "plan.pdf"], "--picture=plan.pdf must end in .png"),
        (["--write", "mine"], "--write mine writes what --search found: add --search"),
        (["parallel.tp=3"], "world size 8 is not a multiple of tp 3"),
    ],
)
def test_a_mistake_is_one_line_with_status_2(argv, says, folder, capsys):
    given = ["sft", f"model.path={folder / 'model'}", "--gpus", "8", *argv]
    assert plan.main(given) == 2
    err = capsys.readouterr().err
    assert err.startswith("isoloss: error: ") and err.count("\n") == 1 and says in err
