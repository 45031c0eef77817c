"""Which checkpoint the folder of a run of isoloss, Megatron-LM or Megatron-Bridge means, and what is refused."""

import re
import shutil
from pathlib import Path

import pytest

from isoloss.models.weights.checkpoint_dirs import checkpoint_folder, export_of
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


# ---- runs of isoloss -------------------------------------------------------------------------------------------------


def save(checkpoint: Path) -> Path:
    checkpoint.mkdir(parents=True)
    for name in (".metadata", "isoloss.json"):
        (checkpoint / name).touch()
    return checkpoint


@pytest.fixture
def own(tmp_path) -> Path:
    """A run with checkpoints of steps 9, 90 and 100,000,000, and what belongs to a user beside them."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step_00000009", "step_00000090", "step_100000000", "step_best", "damaged_step_200000000"):
        save(checkpoints / name)
    (checkpoints / "step_300000000").symlink_to(checkpoints / "step_00000009")
    (checkpoints / "step_400000000").touch()
    return tmp_path / "run"


def test_a_run_means_its_newest_checkpoint(own, tmp_path):
    newest = own / "checkpoints" / "step_100000000"
    assert checkpoint_folder(own) == checkpoint_folder(str(own / "checkpoints")) == checkpoint_folder(newest) == newest
    (own / "hf").mkdir()
    (own / "hf" / "config.json").touch()
    assert checkpoint_folder(own) == newest  # the same weights as in hf, once it is done
    assert checkpoint_folder(own / "hf") == own / "hf"
    assert export_of(own) == export_of(own / "hf") == own / "hf"
    shutil.rmtree(own / "checkpoints")
    assert checkpoint_folder(own) == own / "hf"
    assert export_of(tmp_path) == tmp_path


def test_a_hugging_face_folder_is_no_run(own):
    (own / "config.json").touch()
    assert checkpoint_folder(own) == export_of(own) == own


@pytest.mark.parametrize("lost", (".metadata", "isoloss.json"))
def test_no_older_checkpoint_is_taken_for_the_newest(lost, own):
    newest, before = (own / "checkpoints" / name for name in ("step_100000000", "step_00000090"))
    (newest / lost).unlink()
    says = f"{newest} is the newest checkpoint of its run, and is not complete; give {before}, which is"
    assert refused(own) == refused(own / "checkpoints") == says
    for name in ("step_00000009", "step_00000090"):
        (own / "checkpoints" / name / lost).unlink()
    assert refused(own).endswith("and is not complete; copy it again")
