"""Views of mapped files: of any size; what the disk does not give is told, and no process dies of it."""

import os
import sys

import psutil
import pytest
import torch

from isoloss.models.weights.mmap import fetch, map_file, view
from isoloss.parallel.runtime.errors import UserError

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells")


def test_a_view_is_what_stands_in_the_file(tmp_path):
    numbers = torch.randn(7, 5)
    (tmp_path / "file").write_bytes(b"123" + numbers.numpy().tobytes())
    found = view(map_file(tmp_path / "file"), 3, torch.float32, (7, 5))
    assert torch.equal(fetch(found[2:, 1::2], tmp_path / "file"), numbers[2:, 1::2])
    assert view(map_file(tmp_path / "file"), 3, torch.float32, (0, 5)).shape == (0, 5)


@linux
def test_a_file_larger_than_the_memory(tmp_path):
    """A shard or a checkpoint of a large model; most of this one takes no room on the disk."""
    size = 4 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
        file.seek(size - 8)
        file.write(bytes(range(8)))
    found = view(map_file(tmp_path / "file"), size - 8, torch.uint8, (8,))
    assert fetch(found, tmp_path / "file").tolist() == list(range(8))


@linux
def test_a_file_that_is_cut_short_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    found = view(map_file(path), 0, torch.uint8, (100, 1000))
    os.truncate(path, 50_000)
    assert not fetch(found[:50], path).any()
    for part in (found, found[90:], found.T[1:2]):
        with pytest.raises(UserError, match=r"file cannot be read: its disk fails, or it was cut short just now; copy"):
            fetch(part, path)
