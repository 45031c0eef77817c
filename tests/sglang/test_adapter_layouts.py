"""An adapter that is spread over ranks reaches servers whole."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.servers.adapters import LORA, OPTIONS, SIZES, on_a_layout
from support.servers.server_commands import DOUBLE

from isoloss.models.families.registry import read_architecture
from isoloss.models.lora.served import target_names

CASES = [
    # family, ranks, layout, way, targets
    ("qwen3", 2, {"tp": 2}, "tensor", ("all",)),
    ("qwen3", 2, {"pp": 2}, "disk", ("all",)),
    ("qwen3", 4, {"tp": 2, "pp": 2}, "broadcast", ("attention",)),
    ("qwen3-moe", 2, {"ep": 2}, "tensor", ("all",)),
]


@pytest.fixture(scope="module")
def servers(start, tiny_hf) -> Callable[[str, Sequence[str]], tuple[Path, tuple[str, ...]]]:
    """servers(family, targets) -> the folder of a model, and two doubles that have it."""

    def servers(family: str, targets: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
        folder = tiny_hf(family, **SIZES)
        names = target_names(read_architecture(folder), replace(LORA, targets=tuple(targets)))
        command = f"{DOUBLE.replace('{model}', str(folder))} {OPTIONS} {' '.join(names)}"
        return folder, (start(command), start(command))

    return servers


@pytest.mark.parametrize(("family", "world", "parallel", "way", "targets"), CASES, ids=str)
def test_servers_compute_with_the_adapter_of_every_layout(
    family, world, parallel, way, targets, servers, pool, tmp_path
):
    folder, urls = servers(family, targets)
    lora = replace(LORA, targets=targets)
    for seen in pool.run(world, on_a_layout, urls, folder, tmp_path, way, lora, parallel):
        assert seen["versions"] == [1, 2]
        assert max(seen["worst"]) <= 1e-5 and min(seen["apart"]) > 0.1
        for version, names in zip((1, 2), seen["names"]):
            assert names[0] == names[1] and [name.rsplit("-", 1)[0] for name in names[0]] == [f"policy-{version}"]
