"""The small files of a model's folder: held from the start, written as what the weights are, and nobody else's."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import families

from isoloss.engine.step.engine import Engine
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights import side_files
from isoloss.models.weights.side_files import SideFiles, as_written, declared_stops, read_config, sidecars
from isoloss.parallel.runtime.errors import UserError
from isoloss.recipes import launch


def tiny_folder(path: Path) -> None:
    families.make("llama", num_hidden_layers=3, hidden_size=16, vocab_size=67).save_pretrained(path)


@pytest.mark.parametrize("spelling", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_an_export_tells_the_type_of_its_weights(spelling, tmp_path):
    """Whatever the published file said, in transformers 4's spelling, in 5's, in both or not at all."""
    tiny_folder(tmp_path)
    published = json.loads((tmp_path / "config.json").read_text())
    published = {k: v for k, v in published.items() if k not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(published | dict.fromkeys(spelling, "float32")))
    arch = replace(read_architecture(tmp_path), dtype="bfloat16")
    found = json.loads(as_written(read_config(tmp_path), arch))
    assert found == published | dict.fromkeys(spelling or ("dtype",), "bfloat16")


def test_sidecars(tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    tiny_folder(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    (source / "optimizer.pt").write_text("not part of a model")
    arch = replace(read_architecture(source), dtype="bfloat16")
    SideFiles.of(source).write(target, arch)
    assert sorted(path.name for path in target.iterdir()) == [
        "additional_chat_templates", "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json",
    ]  # fmt: skip
    assert read_architecture(target) == arch
    with pytest.raises(UserError, match=r"has no config.json to copy"):
        SideFiles.of(tmp_path)


@pytest.mark.parametrize(
    ("declared", "defaults", "asked", "found"),
    [
        (7, None, [7], 7),  # as it was
        (7, {"eos_token_id": [7, 8], "top_p": 0.9}, [8], {"eos_token_id": [7, 8], "top_p": 0.9}),
        (7, {"eos_token_id": 8, "top_p": 0.9}, [9, 8], {"eos_token_id": [8, 9], "top_p": 0.9}),
        ([7, 8], None, [9], {"eos_token_id": [7, 8, 9]}),
        (None, None, [9], {"eos_token_id": [9]}),
    ],
)
def test_what_ends_a_turn_is_declared(declared, defaults, asked, found, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    tiny_folder(source)
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": declared}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").unlink(missing_ok=True)
    if defaults is not None:
        (source / "generation_config.json").write_text(json.dumps(defaults))
    SideFiles.of(source).write(target, read_architecture(source), asked)
    written = target / "generation_config.json"
    if isinstance(found, dict):
        assert json.loads(written.read_text()) == found
        assert declared_stops(target) == tuple(found["eos_token_id"])
    else:
        assert not written.exists() and declared_stops(target) == (found,)


# ---- a folder that goes away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ("folder", "config.json", "tokenizer.json"))
def test_a_model_folder_may_go_away(what, inputs, arguments, tmp_path, monkeypatch):
    """After the first of two steps, each with a checkpoint. All that a run writes is as if it had stayed."""
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    step = Engine.train_step

    def then_gone(self, *given):
        if what == "folder":
            shutil.rmtree(model, ignore_errors=True)
        else:
            (model / what).unlink(missing_ok=True)
        return step(self, *given)

    monkeypatch.setattr(Engine, "train_step", then_gone)
    words = [*arguments, f"model.path={model}", "checkpoint.every=1"]
    assert launch.main("sft", words) == 0
    out = Path("out")
    for folder in (out / "hf", *(out / f"checkpoints/step_0000000{k}/huggingface" for k in (1, 2))):
        assert read_architecture(folder) == read_architecture(inputs / "model")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (folder / name).read_bytes() == (inputs / "model" / name).read_bytes()


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path) -> Path:
    """A folder with private files."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    for name in (".ssh/id_rsa", "notes.jinja", "tokenizer.json"):
        (folder / name).write_text("secret")
    return folder


@pytest.mark.parametrize(
    ("name", "target"),
    (
        ("additional_chat_templates", "home"),
        ("merges.txt", "home/.ssh/id_rsa"),
        ("tokenizer.json", "home/tokenizer.json"),
        ("additional_chat_templates/tool.jinja", "home/notes.jinja"),
        ("config.json", "home/tokenizer.json"),
    ),
)
def test_a_link_out_of_the_folder_is_refused(name, target, home, tmp_path):
    model = tmp_path / "model"
    tiny_folder(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=rf"^{model / name} is a link to {tmp_path / target}, outside of the model's"):
        SideFiles.of(model)


def test_only_templates_of_the_folder_of_templates_are_taken(tmp_path):
    tiny_folder(tmp_path)
    (tmp_path / "additional_chat_templates/.ssh").mkdir(parents=True)
    for name in ("tool.jinja", ".ssh/id_rsa", "notes.txt"):
        (tmp_path / "additional_chat_templates" / name).write_text("x")
    assert sidecars(tmp_path) == ("generation_config.json", "additional_chat_templates/tool.jinja")


def test_links_within_the_cache_of_the_hub_are_its_files(tmp_path):
    """models--A--B/snapshots/REVISION/NAME leads to models--A--B/blobs/DIGEST, and to no other model's blobs."""
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots/0123"
    tiny_folder(snapshot)
    (cache / "blobs").mkdir()
    for number, name in enumerate(("config.json", "generation_config.json")):
        (snapshot / name).rename(cache / "blobs" / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    for folder in (snapshot, linked):
        assert SideFiles.of(folder).files.keys() == {"generation_config.json"}
    other = tmp_path / "models--c--d/blobs"
    other.mkdir(parents=True)
    (other / "2").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../../models--c--d/blobs/2")
    with pytest.raises(UserError, match=r"tokenizer.json is a link to .*models--c--d/blobs/2, outside"):
        SideFiles.of(snapshot)


def test_a_link_inside_the_folder_is_a_file_of_it(tmp_path):
    tiny_folder(tmp_path)
    (tmp_path / "own.json").write_text("{}")
    (tmp_path / "tokenizer.json").symlink_to("own.json")
    assert SideFiles.of(tmp_path).files["tokenizer.json"] == b"{}"


def test_what_is_no_file_or_too_large_is_refused(tmp_path, monkeypatch):
    tiny_folder(tmp_path)
    os.mkfifo(tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"vocab.json is no file: put"):
        SideFiles.of(tmp_path)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.json").mkdir()
    with pytest.raises(UserError, match=r"vocab.json is no file: put"):
        SideFiles.of(tmp_path)
    (tmp_path / "vocab.json").rmdir()
    monkeypatch.setattr(side_files, "MAX_BYTES", 10_000)
    (tmp_path / "vocab.json").write_bytes(b" " * 10_000)
    assert len(SideFiles.of(tmp_path).files["vocab.json"]) == 10_000
    (tmp_path / "vocab.json").write_bytes(b" " * 10_001)
    with pytest.raises(UserError, match=r"vocab.json has 10,001 bytes, more than 10,000"):
        SideFiles.of(tmp_path)
