"""What cannot be run is refused in one line, with status 2, before any process group
(tests/support/faults/impossible.py)."""

import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from support.faults import impossible

from isoloss.recipes import launch


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    impossible.write_models(folder)
    return folder


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """An empty folder to run in; and one for the mark that one rank of the node has spoken, of this test alone."""
    folder, marks = tmp_path / "work", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(marks))
    return folder


@pytest.mark.parametrize("row", impossible.ROWS, ids=str)
def test_it_is_refused_in_one_line(row, models, work, monkeypatch, capsys):
    def init_process_group(*args, **kwargs):
        raise AssertionError("a process group is about to be created")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setenv("WORLD_SIZE", str(row.world))
    monkeypatch.setenv("RANK", "0")
    argv = [f"model.path={models / row.model}", "model.from_scratch=true", "data.train=rows.jsonl", *row.overrides]

    status = launch.main(row.recipe, argv)

    out, err = capsys.readouterr()
    assert status == 2 and out == "", err
    (line,) = err.splitlines()
    assert line.startswith("isoloss: error: ")
    for part in row.says:
        assert part in line, line
    assert not dist.is_initialized() and list(work.iterdir()) == []


def test_there_are_enough():
    assert len(impossible.ROWS) >= 60
    assert {row.model for row in impossible.ROWS} == impossible.MODELS.keys()
