"""Tiny models and checkpoints of them, each made once for all tests that read it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import plain_megatron, tiny_models


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory) -> Callable[..., Path]:
    """tiny_hf(architecture, **changes of its configuration) -> a Hugging Face folder, not to be written to."""
    written: dict[str, Path] = {}

    def of(architecture: str, **changes: Any) -> Path:
        key = f"{architecture} {sorted(changes.items())}"
        if key not in written:
            written[key] = tiny_models.write(tmp_path_factory.mktemp("hf"), architecture, **changes)
        return written[key]

    return of


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
