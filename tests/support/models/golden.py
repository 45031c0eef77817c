"""Record what follows from the architecture of every model of the tests, as hashes, in golden.json.

`cd tests; ../.venv/bin/python -m support.models.golden` writes the file again. With a model and a section it prints
what the hash stands for: `python -m support.models.golden "tiny gemma-4" refusals`. A change of a hash is a change of
names in files, of a plan, or of a message that users read; write the file again only for one that was meant.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from isoloss.engine.batching.balance import CostModel
from isoloss.engine.config import rules
from isoloss.engine.config.schema import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.memory.estimate import resident_memory
from isoloss.engine.rl.config import RLConfig, RLDataConfig, RolloutConfig
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import family_of
from isoloss.models.flops import layer_flops, output_flops
from isoloss.models.kinds.weight import Weight
from isoloss.models.mcore import transformer_engine
from isoloss.models.mcore.activation_memory import RECOMPUTE_MODULES
from isoloss.models.mcore.build import transformer_config
from isoloss.models.mcore.layer_config import PLAIN
from isoloss.models.mcore.stages import stage_layers
from isoloss.models.weights import recorded_config
from isoloss.models.weights.checkpoint_names import Style, checkpoint_rows, local_name, native_style
from isoloss.models.weights.weight_map import num_parameters, weight_map
from isoloss.parallel import Layout, UserError
from support.models import published
from support.models.families import MODELS
from support.models.families import published as tiny

FILE = Path(__file__).with_suffix(".json")
PUBLISHED = {name: value for name, value in vars(published).items() if name.isupper()}
NAMES = tuple(f"tiny {name}" for name in MODELS) + tuple(f"published {name}" for name in PUBLISHED)
FEW = 6  # layers of published models with experts: more are like these
TP = (1, 2, 3, 4, 8)
STAGES = ((2, 1), (4, 1), (2, 2), (4, 2), (8, 1))
LENGTHS = (1, 100, 4096, 100_000)
LAYOUTS = (
    {}, {"tp": 2}, {"tp": 3}, {"tp": 4}, {"tp": 6}, {"tp": 8}, {"tp": 16}, {"tp": 2, "sequence_parallel": False},
    {"ulysses": 2}, {"ulysses": 3}, {"ulysses": 8}, {"ring": 2}, {"ring": 3}, {"tp": 2, "ulysses": 2},
    {"tp": 2, "ulysses": 4}, {"tp": 2, "ring": 4}, {"ulysses": 2, "ring": 2}, {"pp": 2}, {"pp": 2, "vpp": 2},
    {"pp": 128}, {"pp": 2, "stage_layers": (1, 2, 3)}, {"pp": 2, "stage_layers": (1, 2000)}, {"ep": 2}, {"ep": 3},
    {"ep": 64}, {"etp": 2}, {"etp": 3}, {"tp": 2, "ep": 2}, {"tp": 3, "ulysses": 3}, {"tp": 4, "etp": 3, "ring": 3},
)  # fmt: skip
KERNELS = ("p2p", "a2a", "all_gather", "a2a+p2p")


def _settings() -> Iterator[dict[str, Any]]:
    """Keyword arguments of a configuration: of each group that a rule reads together with the model."""
    for layout in LAYOUTS:
        yield {"parallel": ParallelConfig(**layout)}
    for module in RECOMPUTE_MODULES:
        yield {"memory": MemoryConfig("selective", (module,))}
    yield {"memory": MemoryConfig("selective", RECOMPUTE_MODULES)}
    yield {"memory": MemoryConfig("full", recompute_layers=1000)}
    yield {"memory": MemoryConfig(offload_layers=1000)}
    yield {"moe": MoeConfig(bias_update_rate=0.1)}
    yield {"moe": MoeConfig(aux_loss="sequence", aux_loss_coef=0.1, z_loss_coef=0.1)}
    yield {"moe": MoeConfig(dispatch_bound=2.0), "parallel": ParallelConfig(ep=2)}
    yield {"moe": MoeConfig(dispatcher="deepep"), "parallel": ParallelConfig(ep=2)}
    for kernel in KERNELS:
        for layout in ({}, {"ulysses": 2}, {"ring": 2}, {"tp": 2, "ulysses": 2, "ring": 2}):
            yield {
                "parallel": ParallelConfig(cp_kernel=kernel, **layout), "train": TrainConfig(precision="bf16"),
                "model": ModelConfig("anywhere", transformer_engine=True),
            }  # fmt: skip
    for backend in ("megatron", "sglang"):
        for length in (8, 1 << 20):
            yield {
                "rollout": RolloutConfig(backend=backend, **_servers(backend)),
                "data": RLDataConfig(max_length=length),
            }


def _servers(backend: str) -> dict[str, Any]:
    return {"servers": ("http://127.0.0.1:1",)} if backend == "sglang" else {}


def architecture(name: str) -> Architecture:
    source, _, model = name.partition(" ")
    config = tiny(model) if source == "tiny" else PUBLISHED[model]
    arch = family_of(config["architectures"][0]).architecture(config)
    return replace(arch, layers=arch.layers[:FEW]) if source == "published" and arch.experts else arch


@cache
def _few(arch: Architecture) -> tuple[Weight, ...]:
    """The weight map without most experts, which differ from their neighbors by a number."""
    last = max((weight.expert or 0 for weight in weight_map(arch)), default=0)
    return tuple(weight for weight in weight_map(arch) if weight.expert in (None, 0, 1, last))


def weights(arch: Architecture) -> Iterator[str]:
    for weight in _few(arch):
        yield repr(weight)
    for changed in (arch.text_only(), arch.as_critic()):
        for weight in (*weight_map(changed)[:3], *weight_map(changed)[-3:]):
            yield repr(weight)


def shards(arch: Architecture) -> Iterator[str]:
    """Shapes over TP ranks, or why there are none, of each kind of weight once."""
    for weight in {(weight.mapping, weight.shape): weight for weight in _few(arch)}.values():
        for tp in TP:
            try:
                shape = tuple(weight.mapping.shard(torch.empty(weight.shape, device="meta"), tp, tp - 1).shape)
            except UserError as error:
                shape = str(error)
            yield f"{weight.name} {tp}: {shape}"


def names(arch: Architecture) -> Iterator[str]:
    yield str(native_style(arch))
    for weight in _few(arch):
        for style in Style:
            rows = checkpoint_rows(weight, arch, style)
            yield f"{weight.name} {style}: {rows}"
            if style is Style.PER_LAYER and weight.layer is not None:
                within = rows[0].key.removeprefix(f"decoder.layers.{weight.layer}.")
                yield f"{within}: {local_name(within, arch.layers[weight.layer])}"


def stages(arch: Architecture) -> Iterator[str]:
    for pp, vpp in STAGES:
        if pp * vpp <= arch.num_layers:
            yield f"{pp}x{vpp}: {stage_layers(arch, Layout(pp=pp, vpp=vpp))}"


def flops(arch: Architecture) -> Iterator[str]:
    yield repr(CostModel.of(arch))
    for tokens in LENGTHS:
        yield f"{tokens}: {output_flops(arch, tokens)} {layer_flops(arch, tokens)}"


def recorded(arch: Architecture) -> Iterator[str]:
    yield from sorted({repr(wanted) for wanted in recorded_config._wanted(arch)})


def megatron(arch: Architecture) -> Iterator[str]:
    """Megatron-Core's configuration, without addresses of functions."""
    for degrees in ({}, {"tp": 2, "ep": 2}, {"pp": 2}):
        layout = Layout(**degrees).with_world(4)
        try:
            config = transformer_config(arch, layout, torch.float32, stage_layers(arch, layout), PLAIN)
            settings = {field.name: repr(getattr(config, field.name)) for field in fields(TransformerConfig)}
        except (ValueError, AssertionError) as error:
            settings = {"refused": repr(error)}
        for name, value in settings.items():
            yield f"{degrees} {name}: {re.sub(' at 0x[0-9a-f]+', '', value)}"


def _refusals(arch: Architecture, first: bool) -> Iterator[str]:
    """All that is refused, or what `rules.check` says, of each setting."""
    with mock.patch.object(transformer_engine, "installed", lambda: Version("2.19")):
        for number, settings in enumerate(_settings()):
            kind = RLConfig if "rollout" in settings else Config
            config = kind(**{"model": ModelConfig("anywhere"), **settings})
            for critic in (False, True):
                setup = rules.Setup(config, arch.as_critic() if critic else arch, config.parallel.layout())
                found = _first(setup) if first else sorted({line for of in rules.SUBJECTS for line in of(setup)})
                yield f"setting {number}{' of a critic' * critic}: {found}"


def _first(setup: rules.Setup) -> str:
    try:
        rules.check(setup.config, setup.arch, setup.layout)
    except UserError as error:
        return str(error)
    return ""


def refusals(arch: Architecture) -> Iterator[str]:
    yield from _refusals(arch, first=False)


def first_refusals(arch: Architecture) -> Iterator[str]:
    yield from _refusals(arch, first=True)


def memory(arch: Architecture) -> Iterator[str]:
    """Weights, gradients and optimizer; activations are counted, and compared with dry runs."""
    for degrees in ({}, {"tp": 2}, {"ulysses": 2, "pp": 2}, {"tp": 2, "ep": 2}):
        parallel = ParallelConfig(**degrees)
        precision = TrainConfig(precision="bf16")
        config = Config(ModelConfig("anywhere"), DataConfig(max_length=256), parallel=parallel, train=precision)
        yield f"{degrees}: {resident_memory(config, arch, parallel.layout().with_world(8))}"


SECTIONS: Mapping[str, Callable[[Architecture], Iterator[str]]] = {
    "weights": weights, "shards": shards, "names": names, "stages": stages, "flops": flops, "recorded": recorded,
    "megatron": megatron, "refusals": refusals, "first refusals": first_refusals, "memory": memory,
}  # fmt: skip


def record(name: str) -> dict[str, Any]:
    arch = architecture(name)
    text = {section: "\n".join(lines(arch)) for section, lines in SECTIONS.items()}
    return {
        "parameters": num_parameters(arch),
        "weights": len(weight_map(arch)),
        "stages of 4": stage_layers(arch, Layout(pp=4)) if arch.num_layers >= 4 else None,
        **{f"{section} sha256": hashlib.sha256(lines.encode()).hexdigest()[:16] for section, lines in text.items()},
    }


@cache
def golden() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("\n".join(SECTIONS[sys.argv[2]](architecture(sys.argv[1]))))
    else:
        FILE.write_text(json.dumps({name: record(name) for name in NAMES}, indent=1) + "\n")
