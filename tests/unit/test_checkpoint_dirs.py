"""Which checkpoint a folder of Megatron-LM or Megatron-Bridge means, and what is refused."""

import re
from pathlib import Path

import pytest

from isoloss.models.weights.checkpoint_dirs import checkpoint_folder
from isoloss.parallel.runtime.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with iterations 50, 100 and 12,345,678, of which the tracker names the second."""
    for name in ("iter_0000050", "iter_0000100", "iter_12345678", "iter_notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / TRACKER).write_text("100")
    return tmp_path


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        checkpoint_folder(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_tracker_says_which(run):
    assert checkpoint_folder(run) == run / "iter_0000100"
    (run / TRACKER).write_text("12345678\n")
    assert checkpoint_folder(str(run)) == run / "iter_12345678"


def test_what_is_a_checkpoint_or_no_folder_of_iterations_is_taken_as_it_is(run, tmp_path):
    assert checkpoint_folder(run / "iter_0000050") == run / "iter_0000050"
    assert checkpoint_folder(tmp_path / "missing") == tmp_path / "missing"
    (run / ".metadata").touch()
    assert checkpoint_folder(run) == run
    hf = run / "hf"
    (hf / "iter_0000001").mkdir(parents=True)
    (hf / "iter_0000001" / ".metadata").touch()
    (hf / "config.json").touch()
    assert checkpoint_folder(hf) == hf


def test_release_is_a_folder_like_any_other(run):
    (run / TRACKER).write_text("release")
    assert refused(run) == f"{run}/{TRACKER} names release, which is not there; give {run}/iter_12345678"
    (run / "release").mkdir()
    assert f"{run}/release, which {TRACKER} names, has no .metadata" in refused(run)
    (run / "release" / ".metadata").touch()
    assert checkpoint_folder(run) == run / "release"


def test_a_tracker_that_names_none_is_refused(run):
    (run / TRACKER).write_text("200")
    assert refused(run) == f"{run}/{TRACKER} names iter_0000200, which is not there; give {run}/iter_12345678"
    for text in ("", "newest", "-1", "1e3", "100 50", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 400):
        (run / TRACKER).write_text(text)
        assert "where the number of an iteration should stand, or 'release'; give " in refused(run)


def test_an_unfinished_one_is_refused_and_another_named(run):
    (run / "iter_0000100" / ".metadata").unlink()
    says = f"{run}/iter_0000100, which {TRACKER} names, has no .metadata: .*; give {run}/iter_12345678"
    assert re.fullmatch(says, refused(run))
    for name in ("iter_0000050", "iter_12345678"):
        (run / name / ".metadata").unlink()
    assert refused(run).endswith("copy it again")


def test_without_a_tracker_none_is_guessed(run):
    (run / TRACKER).unlink()
    assert refused(run) == (
        f"{run} has no {TRACKER} that says which of its checkpoints is meant; give {run}/iter_12345678"
    )


@pytest.mark.parametrize("rank", ["mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_001"])
def test_the_legacy_format_is_refused_with_the_way_out(rank, tmp_path):
    """Named by its parent or itself."""
    file = tmp_path / "iter_0000100" / rank / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / TRACKER).write_text("100")
    for path in (tmp_path, tmp_path / "iter_0000100"):
        says = refused(path)
        assert says.startswith(f"{tmp_path}/iter_0000100 is in Megatron-LM's legacy format (mp_rank_00/...)")
        assert "--ckpt-convert-format torch_dist --ckpt-convert-save DIR" in says
