"""A run that cannot fit its GPUs is refused, with a key that helps; plan and measurement are told side by side."""

import dataclasses
import json
import re

import pytest
from support.models import families

from isoloss.engine.config.schema import Config
from isoloss.engine.memory import preflight
from isoloss.engine.memory.limits import GIB, MARGIN
from isoloss.engine.memory.preflight import PeakReport
from isoloss.engine.step import model_source
from isoloss.models.families.registry import read_architecture
from isoloss.parallel import UserError
from isoloss.parallel.runtime import device
from isoloss.recipes.launch import compose_config

pytestmark = pytest.mark.xdist_group("counting")  # one process counts for all of it, and keeps the counts
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    changes = SIZES | {"num_attention_heads": 16, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(families.published("qwen3", **changes)))
    return folder


def configured(model, *keys: str) -> Config:
    given = [f"model.path={model}", "train.precision=bf16", "data.max_length=2048", "batch.max_tokens=16384", *keys]
    return compose_config("sft", Config, given)[0]


def resident_bytes(arch, dp: int, pp: int = 1) -> list[float]:
    """By hand: h, a quarter of keys and values, two norms and two of queries and keys in each of four layers; both
    ends. bf16 weights, fp32 gradients, twelve bytes of optimizer shared by dp ranks."""
    h, f, vocab = 1024, 3072, 4096
    layer = 2 * h * h + 2 * h * (h // 4) + 3 * h * f + 2 * h + 2 * 64
    ends = [vocab * h + vocab * h + h] if pp == 1 else [vocab * h, vocab * h + h]
    assert arch.num_layers == 4
    return [(4 // pp * layer + end) * (2 + 4 + 12 / dp) for end in ends]


@pytest.mark.parametrize(("world", "keys"), [(1, ()), (8, ()), (8, ("parallel.pp=2",))])
def test_what_stays_is_known_by_hand(world, keys, model):
    config, arch = configured(model, *keys), read_architecture(model)
    layout = config.parallel.layout().with_world(world)
    stages = preflight.planned(config, arch, layout)
    found = [stage.weights + stage.gradients + stage.optimizer for stage in stages]
    assert found == pytest.approx(resident_bytes(arch, layout.dp, layout.pp), rel=1e-6)


def told(config: Config, model, device_bytes: float, world: int = 1) -> str:
    with pytest.raises(UserError) as error:
        preflight.check(config, read_architecture(model), config.parallel.layout().with_world(world), device_bytes)
    assert "\n" not in str(error.value)
    return str(error.value)


def peak(config: Config, model, world: int = 1) -> float:
    layout = config.parallel.layout().with_world(world)
    return max(stage.peak for stage in preflight.planned(config, read_architecture(model), layout))


def test_it_is_refused_by_a_byte(model):
    config = configured(model)
    needed = peak(config, model) + MARGIN
    preflight.check(config, read_architecture(model), config.parallel.layout(), needed)
    line = told(config, model, needed - 1)
    assert line.startswith(f"the plan needs {needed / GIB:.1f} GiB on each GPU of pipeline rank 0 (weights 0.1, ")
    assert line.endswith("set batch.max_tokens=8192, or memory.check=false to go on as it is")


def test_the_parts_are_the_whole(model):
    line = told(configured(model), model, GIB)
    whole, *parts = (float(number) for number in re.findall(r"[\d.]+(?= GiB on|[,)])", line))
    assert len(parts) == 5 and sum(parts) == pytest.approx(whole, abs=0.3)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.45, 0.35, 0.25])
def test_what_it_tells_to_set_fits(share, model):
    """At any size of a GPU: the keys that it names, given as they stand, are accepted there."""
    config = configured(model)
    device_bytes = share * peak(config, model) + MARGIN
    keys = re.search(r": set (.*), or memory.check", told(config, model, device_bytes))
    assert keys is not None, "none of the keys helps"
    changed = configured(model, *re.split(r", | and ", keys[1]))
    assert changed != config
    preflight.check(changed, read_architecture(model), changed.parallel.layout(), device_bytes)


def test_where_no_key_helps_it_says_what_does(model):
    assert "take more GPUs, or a layout that python -m isoloss.tools.plan finds" in told(configured(model), model, GIB)


def test_a_change_that_is_not_legal_is_not_advised(model):
    """fp64 has no offloading of the optimizer."""
    config = configured(model, "train.precision=fp64")
    for device_bytes in range(int(MARGIN), int(peak(config, model) + MARGIN), GIB // 8):
        assert "offload" not in told(config, model, device_bytes)


def test_the_worst_stage_is_named(model):
    """The first of four: it holds the most micro-batches."""
    config = configured(model, "parallel.pp=4")
    assert "of pipeline rank 0 (" in told(config, model, MARGIN, world=4)
    config = configured(model, "parallel.pp=2", "parallel.stage_layers=[1,3]", "memory.recompute=full")
    assert "of pipeline rank 1 (" in told(config, model, MARGIN, world=2)


def test_a_row_that_is_longer_than_the_budget_counts(model):
    short = configured(model, "batch.max_tokens=2048")
    long = dataclasses.replace(short, data=dataclasses.replace(short.data, max_length=8192))
    assert peak(long, model) == peak(configured(model, "batch.max_tokens=8192"), model) > peak(short, model)


def test_a_run_asks_its_gpu(model, monkeypatch):
    config = configured(model, "model.from_scratch=true")
    assert device.memory_bytes() is None and device.peak_bytes() is None  # a CPU has no limit that a rank could know
    model_source.resolve(config)
    monkeypatch.setattr(device, "memory_bytes", lambda: GIB)
    with pytest.raises(UserError, match=r"^the plan needs "):
        model_source.resolve(config)
    model_source.resolve(configured(model, "model.from_scratch=true", "memory.check=false"))


def test_plan_and_measurement_are_told_side_by_side():
    report = PeakReport(lambda: 10 * GIB)
    assert report.after_step(None) is None
    first = report.after_step(9 * GIB)
    assert first == "device memory of rank 0: planned peak 10.0 GiB, measured 9.0 GiB in the first step"
    assert report.after_step(10.9 * GIB) is None
    again = report.after_step(11.1 * GIB)
    assert again is not None and "planned peak 10.0 GiB, measured 11.1 GiB: more than planned" in again
    assert report.after_step(12 * GIB) is None
    assert "more than planned" in (PeakReport(lambda: 10 * GIB).after_step(11.1 * GIB) or "")
    of_a_small_model = PeakReport(lambda: GIB / 4).after_step(GIB / 4 + (64 << 20))  # which cuBLAS took
    assert of_a_small_model is not None and of_a_small_model.endswith("in the first step")
