"""What a conversion and the loading of weights say of how far they are: on a terminal, in a log, on another rank."""

from itertools import count
from unittest import mock

import pytest
from support.models.families import write_folder
from support.runs.terminal import terminal

from isoloss.models import model
from isoloss.models.conversion import transfer
from isoloss.models.conversion.plan import FilePlan, OutputFile, Source
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights.hf_checkpoint import HFReader
from isoloss.models.weights.manifest import files_to_json
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel import UserError
from isoloss.parallel.runtime import console
from isoloss.tools.convert.verify_models import isoloss_model


@pytest.fixture
def slow(monkeypatch):
    """Six seconds pass between two looks at the clock."""
    monkeypatch.setattr(console, "monotonic", count(0, 6).__next__)


@pytest.fixture
def plan(tmp_path):
    contents = [(tmp_path / name, size) for name, size in (("a", 3 << 20), ("b", 1 << 20))]
    for path, size in contents:
        path.write_bytes(bytes(size))
    files = tuple(OutputFile(path.name, (path,)) for path, _ in contents)
    sources = tuple(Source.of(path, None) for path, _ in contents)
    return FilePlan(files, sources, ("manifest.json", lambda records: str(files_to_json(records))))


def test_a_conversion_in_a_log(tmp_path, plan, slow, capsys):
    """A megabyte a look, of which every second one prints; then one that an earlier run had finished."""
    failing = mock.patch.object(transfer, "_publish", side_effect=OSError(5, "gone"))
    with failing, pytest.raises(UserError, match="gone"):
        transfer.run(plan, tmp_path / "out", workers=1, label="hf-to-mcore")
    assert capsys.readouterr().err.splitlines() == [
        "hf-to-mcore 1.05 of 4.19 MB  0.17 MB a second  ETA 0:00:18",
        "hf-to-mcore 3.15 of 4.19 MB  0.17 MB a second  ETA 0:00:06",
    ]
    (tmp_path / ".out.partial/journal/files/b.json").unlink()
    transfer.run(plan, tmp_path / "out", workers=1, label="hf-to-mcore")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-to-mcore 4.19 of 4.19 MB  0.17 MB a second")


def test_a_conversion_on_a_terminal(tmp_path, plan, slow, monkeypatch):
    with terminal(monkeypatch, 100) as screen:
        transfer.run(plan, tmp_path / "out", workers=1, label="hf-to-mcore")
        assert screen.read() == [""], "nothing is left of the bar"
        assert "hf-to-mcore 2.10 of 4.19 MB" in screen.raw and "━" in screen.raw


@pytest.mark.parametrize("main", [True, False])
def test_rank_0_tells_how_much_it_has_loaded(tmp_path, slow, monkeypatch, capsys, main):
    write_folder("llama", tmp_path)
    monkeypatch.setattr(model, "is_main", lambda: main)
    arch = read_architecture(tmp_path)
    with isoloss_model(arch, HFReader(tmp_path)):
        nbytes = 4 * num_parameters(arch)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("loading")]
    assert bool(lines) == main
    assert all(f" of {nbytes / 1e6:.2f} MB of weights  " in line for line in lines)
