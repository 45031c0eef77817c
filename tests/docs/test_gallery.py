"""The gallery's script makes every picture of the gallery, and ends at the first job that fails."""

import re
import subprocess
from pathlib import Path

import pytest

from isoloss.tools.dev import gallery

DOCS = Path(__file__).parents[2] / "docs"


def test_every_picture_is_made_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(gallery, "run", lambda work, module, *arguments, status=0: None)
    monkeypatch.setattr(gallery, "draw_loss", lambda run, out: None)
    monkeypatch.setattr(gallery, "shrink", lambda picture, out: made.append(out.name))
    gallery.make(tmp_path, tmp_path, tmp_path / "out")
    shown = re.findall(r"\(gallery/([\w.]+\.png)\)", (DOCS / "gallery.md").read_text())
    assert sorted(made) == sorted(shown) == sorted(path.name for path in (DOCS / "gallery").iterdir())


def test_a_job_that_fails_ends_it(tmp_path, monkeypatch):
    ends = {"isoloss.tools.prove": 1, "isoloss.recipes.sft": 2}
    ran = lambda words, **options: subprocess.CompletedProcess(words, ends[words[2]])
    monkeypatch.setattr(subprocess, "run", ran)
    gallery.run(tmp_path, "tools.prove", status=1)
    with pytest.raises(SystemExit, match=r"isoloss.recipes.sft ended with status 2, not 0"):
        gallery.run(tmp_path, "recipes.sft")
