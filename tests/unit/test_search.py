"""The search over layouts: what it counts, what it takes for fast, and the presets that it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.plans.planned_presets import MODELS, SERVERS

from isoloss.engine.config.schema import Config, MemoryConfig
from isoloss.engine.memory.estimate import step_memory
from isoloss.engine.memory.limits import GIB, room
from isoloss.engine.rl.config import RLConfig
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import UserError
from isoloss.parallel.runtime import console
from isoloss.recipes.launch import compose_config
from isoloss.tools.plan import __main__ as plan
from isoloss.tools.plan import plans as presets
from isoloss.tools.plan import search as searching
from isoloss.tools.plan.estimate import host_seconds
from isoloss.tools.plan.hardware import GPUS
from isoloss.tools.plan.search import layouts, search, timed
from isoloss.tools.plan.tables import search_table

pytestmark = pytest.mark.xdist_group("counting")  # one process counts for all of it, and keeps the counts
H100 = GPUS["h100"]
KEYS = ["train.precision=bf16", "data.max_length=8192", "batch.max_tokens=8192", "batch.global_size=128"]


@pytest.fixture
def of(tmp_path):
    """(configuration, architecture) of a size and keys."""

    def made(size, *keys, recipe="sft"):
        (tmp_path / "config.json").write_text(json.dumps(MODELS[size]))
        given = [f"model.path={tmp_path}", *KEYS, *keys]
        kind = Config if recipe == "sft" else RLConfig
        servers = [] if recipe == "sft" else ["rollout.backend=sglang", *SERVERS]
        return compose_config(recipe, kind, [*given, *servers])[0], read_architecture(tmp_path)

    return made


def seconds(config, arch, gpus, gpu=H100):
    return timed(config, arch, config.parallel.layout().with_world(gpus), (0.0,), gpu).seconds


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_a_long_search_tells_how_far_it_is(of, monkeypatch, capsys):
    """Candidates are compared: each layout with each size of a micro-batch that the batch admits."""
    clock, tried = [0.0], []

    def nothing_fits(config, arch, layout, gpu):
        clock[0] += 0.5
        tried.append((layout, config.batch.max_tokens // 8192))

    monkeypatch.setattr(console, "monotonic", lambda: clock[0])
    monkeypatch.setattr(searching, "least_recomputed", nothing_fits)
    config, arch = of("8b", "batch.global_size=16")
    assert list(searching.fitting([config], arch, 8, H100)) == []
    assert {rows for _, rows in tried} == {1, 2, 4} and all(rows * layout.dp <= 16 for layout, rows in tried)
    assert len(set(tried)) == len(tried) > 40
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"searching 10 of {len(tried)} layouts and micro-batches  2 a second  ETA 0:0")
    assert second.startswith(f"searching 30 of {len(tried)} layouts")


# ---- what is fast ----------------------------------------------------------------------------------------------------

# Ops that a layer launches in a step of one micro-batch, forward and backward: counted by dry runs of two and of four
# layers of the published sizes, on 16 GPUs.
COUNTED = {
    ("8b", "parallel.tp=2"): 43,
    ("8b", "parallel.tp=2", "memory.recompute=full"): 58,
    ("30b_a3b", "parallel.ep=8"): 108,
    ("30b_a3b", "parallel.ep=4"): 108,
    ("30b_a3b", "parallel.ep=1"): 98,
    ("30b_a3b", "parallel.ep=8", "parallel.tp=4"): 108,
    ("30b_a3b", "parallel.ep=8", "memory.recompute=full"): 152,
    ("30b_a3b", "parallel.ep=8", "memory.recompute=selective", "memory.recompute_modules=[layernorm,moe]"): 146,
}


@pytest.mark.parametrize("setup", COUNTED, ids=" ".join)
def test_the_host_launches_what_dry_runs_count(of, setup):
    size, *keys = setup
    config, arch = of(size, *keys)
    again = searching._computed_again(config, 2)
    found = searching._launches(config, arch, config.parallel.layout().with_world(16), 2, again)
    assert found == pytest.approx(2 * COUNTED[setup], rel=0.05)


def test_where_the_host_is_slow_its_launches_are_the_time(of, monkeypatch):
    """A device waits for it; what is dense has few ops."""
    monkeypatch.setattr(searching, "LAUNCH_SECONDS", 1e-2)
    config, arch = of("30b_a3b", "parallel.ep=8", "memory.recompute=full")
    kept, _ = of("30b_a3b", "parallel.ep=8")
    assert seconds(config, arch, 8) / seconds(kept, arch, 8) == pytest.approx(152 / 108, rel=0.02)


@pytest.mark.parametrize("keys", (("parallel.tp=4", "parallel.ep=8"), ("parallel.ep=8",), ("parallel.tp=8",)))
def test_ranks_that_share_experts_are_neighbors(of, keys):
    """Whatever tp is: no token leaves a node of 8, so its network does not matter."""
    config, arch = of("30b_a3b", *keys)
    slow = replace(H100, infiniband=1.0)
    assert seconds(config, arch, 8, slow) == seconds(config, arch, 8)


def test_a_layout_that_crosses_nodes_depends_on_their_network(of):
    config, arch = of("8b", "parallel.tp=8", "parallel.ring=2")
    assert seconds(config, arch, 16, replace(H100, infiniband=1e9)) > 1.2 * seconds(config, arch, 16)


# ---- the host's part of the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("share", (0.0, 0.5, 1.0))
def test_the_host_steps_what_is_offloaded(of, share):
    """32B on 8 ranks that share it: 28 bytes a parameter at 300 GB/s for all of a node, 6 a rank at 50 GB/s."""
    config, arch = of("32b", "parallel.tp=8", f"memory.offload_optimizer={share}")
    found = host_seconds(config, arch, config.parallel.layout().with_world(8))
    assert found == pytest.approx(share * 32.76e9 * (28 / 300e9 + 6 / 8 / 50e9), rel=0.01)
    plain = replace(config, memory=MemoryConfig())
    assert seconds(config, arch, 8) - seconds(plain, arch, 8) == pytest.approx(found)


# ---- what fits -------------------------------------------------------------------------------------------------------


def test_there_is_less_room_beside_a_server(of):
    shared, arch = of("32b", "rollout.colocated=true", "memory.offload_optimizer=1.0", recipe="grpo")
    alone, _ = of("32b", "memory.offload_optimizer=1.0", recipe="grpo")
    assert room(alone, H100.memory) / GIB == pytest.approx(74) and room(shared, H100.memory) / GIB == pytest.approx(69)
    assert max(max(found.peaks) for found in search(shared, arch, 8, H100)) <= room(shared, H100.memory)
    assert max(max(found.peaks) for found in search(alone, arch, 8, H100)) > room(shared, H100.memory)


def test_memory_of_the_host_is_taken_where_that_is_faster(of):
    """Without it 32B fits on one node only where all layers are computed again. In fp32 it is illegal."""
    config, arch = of("32b")
    best = search(config, arch, 8, H100)[0]
    assert best.config.memory.offload_optimizer > 0 and best.config.memory.recompute == "none"
    alone = [c for c in search(config, arch, 8, H100) if not c.config.memory.offload_optimizer]
    assert all(c.config.memory.recompute == "full" and c.seconds > best.seconds for c in alone)
    config, arch = of("32b")
    assert not search(config, arch, 16, H100)[0].config.memory.offload_optimizer  # it fits without
    config, arch = of("8b", "train.precision=fp32")
    assert all(not c.config.memory.offload_optimizer for c in search(config, arch, 64, H100))


def test_experts_are_divided_too(of):
    config, arch = of("30b_a3b")
    found = {c.layout.etp: c for c in reversed(search(config, arch, 16, H100))}
    assert {1, 2, 4} <= found.keys() and found[1].seconds < found[2].seconds  # tokens travel once more


def test_candidates_are_legal_fit_and_come_fastest_first(of):
    config, arch = of("32b")
    found = search(config, arch, 16, H100)
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    for candidate in found:
        layout = candidate.config.parallel.layout().with_world(16)
        assert layout == candidate.layout
        peaks = tuple(stage.peak for stage in step_memory(candidate.config, arch, layout))
        assert peaks == candidate.peaks and max(peaks) <= 74 * GIB
    legal = list(layouts(config, arch, 16))
    assert {layout for layout, _ in legal} >= {candidate.layout for candidate in found}
    assert all(parallel.layout().with_world(16) == layout for layout, parallel in legal)


def test_nothing_fits_where_weights_alone_do_not(of):
    config, arch = of("70b")
    assert search(config, arch, 4, H100) == []


def test_the_table_tells_what_a_run_would_be(of):
    config, arch = of("32b")
    best, *_ = search(config, arch, 16, H100)
    assert min(best.peaks) < max(best.peaks)
    head, line = search_table([best]).splitlines()
    for told in (str(best.layout), "8192", "nothing", f"{max(best.peaks) / GIB:.1f}", f"{best.seconds:.1f}"):
        assert told in line.split()
    assert f"{best.tokens_per_gpu_second:,.0f}" in line and f"{best.mfu:.0%}" in line and "tokens/s/GPU" in head
    assert best.tokens_per_gpu_second == pytest.approx(128 * 8192 / best.seconds / 16)


# ---- presets that it writes ------------------------------------------------------------------------------------------


def test_a_written_preset_is_the_candidate(of, tmp_path, monkeypatch):
    config, arch = of("32b", "memory.offload_optimizer=1.0", "parallel.overlap_grad_reduce=true")
    best = search(config, arch, 8, H100)[0]
    (tmp_path / "sft" / "preset").mkdir(parents=True)
    monkeypatch.setattr(presets, "CONF", tmp_path)
    file, word = presets.write_preset("sft", "mine", best)
    assert word == "preset=mine"
    text = file.read_text()
    assert text.startswith("# @package _global_\n")
    told = f"# 8 GPUs, {best.layout}: {max(best.peaks) / GIB:.1f} GiB, {best.seconds:.1f} s a step\n"
    assert told in text and "model" not in text.replace("models", "")
    keys = [
        f"{group}.{key}={str(value).replace(' ', '').lower() if not isinstance(value, str) else value}"
        for group, values in yaml.safe_load(text).items()
        for key, value in values.items()
    ]
    again = compose_config("sft", Config, [f"model.path={config.model.path}", *keys])[0]
    assert again == best.config
    with pytest.raises(UserError, match=r"mine\.yaml exists"):
        presets.write_preset("sft", "mine", best)
    own = str(tmp_path / "own.yaml")
    assert presets.write_preset("sft", own, best) == (Path(own), f"config={own}")
    model = f"model.path={config.model.path}"
    assert compose_config("sft", Config, ["preset=plain", model, f"config={own}", "data.train=[x]"])[0] == replace(
        best.config, data=replace(best.config.data, train=("x",))
    )
    monkeypatch.setattr(presets, "CONF", tmp_path / "none")  # as a folder of an installation that is not the user's
    with pytest.raises(UserError, match=r"No such file.*or a file of your own: --write mine\.yaml"):
        presets.write_preset("sft", "mine", best)


def asked(of, size, *arguments):
    config, _ = of(size)
    return plan.main(["sft", "preset=plain", f"model.path={config.model.path}", *KEYS, "--gpus", "8", *arguments])


def test_a_search_from_the_command_line(of, capsys):
    assert asked(of, "8b", "--search") == 0
    out = capsys.readouterr().out.splitlines()
    config, arch = of("8b")
    assert [line.split()[0] for line in out[2:]] == [str(c.layout) for c in search(config, arch, 8, H100)[:5]]


def test_a_search_that_finds_nothing(of, capsys):
    assert asked(of, "70b", "--search", "--write", "none", "train.precision=fp32") == 1
    assert "no layout fits" in capsys.readouterr().out


def test_only_a_search_writes(of, capsys):
    assert asked(of, "8b", "--write", "mine") == 2
    assert "add --search" in capsys.readouterr().err
