"""Checkpoints that bring a program along: nothing of it runs, whatever reads them, and one line says what was found."""

import argparse
import io
import json
import os
import pathlib
import pickle
import resource
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from support.faults import hostile, hostile_pickles
from support.faults.hostile import Payload, archive, by_name, saved
from torch.distributed.checkpoint import filesystem, planner
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties

from isoloss.models.families.registry import read_architecture
from isoloss.models.weights import manifest, megatron_args, recorded_config, tensor_archive
from isoloss.models.weights.checkpoint_dirs import checkpoint_folder
from isoloss.models.weights.distcp import Folder
from isoloss.models.weights.weight_map import hf_shapes, weight_map
from isoloss.parallel import UserError
from isoloss.recipes import launch
from isoloss.tools.convert import __main__ as convert

WEIGHT = "embedding.word_embeddings.weight"


def overrides(inputs: Path) -> list[str]:
    return [
        f"model.path={inputs}/model", "model.from_scratch=true", f"data.train={inputs}/rows.jsonl", "data.eval=[]",
        "data.max_length=128", "batch.global_size=4", "batch.max_tokens=256", "train.steps=1", "output_dir=out",
        "checkpoint.export_hf=false",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory) -> Path:
    """The folder of a run of one step, not to be written to."""
    here = tmp_path_factory.mktemp("trained")
    argv = [f"{each}" if each != "output_dir=out" else f"output_dir={here}/out" for each in overrides(inputs)]
    assert launch.main("sft", argv) == 0
    return here / "out"


@pytest.fixture
def checkpoint(trained, tmp_path, monkeypatch) -> Path:
    """The checkpoint of a copy of the run, in out/ of the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "out")
    return Path("out/checkpoints/step_00000001")


@pytest.fixture
def mark(tmp_path) -> Path:
    """What a program makes that runs."""
    return tmp_path / "mark"


def metadata(folder: Path):
    return pickle.loads((folder / ".metadata").read_bytes())  # of our own making


def with_planner_data(folder: Path, mark: Path) -> bytes:
    return pickle.dumps(replace(metadata(folder), planner_data=Payload(mark)))


def with_path(folder: Path, path: str) -> bytes:
    """Of the first piece of a weight."""
    found = metadata(folder)
    index = next(index for index in found.storage_data if index.fqn == WEIGHT)
    found.storage_data[index] = replace(found.storage_data[index], relative_path=path)
    return pickle.dumps(found)


def with_object(folder: Path, mark: Path) -> bytes:
    """A weight that is an object: torch's planner would unpickle it without any limit."""
    found, payload = metadata(folder), saved(Payload(mark))
    old = next(index for index in found.storage_data if index.fqn == WEIGHT)
    info = found.storage_data.pop(old)
    path = folder / info.relative_path
    found.storage_data[MetadataIndex(WEIGHT)] = replace(info, offset=path.stat().st_size, length=len(payload))
    path.write_bytes(path.read_bytes() + payload)
    found.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    return pickle.dumps(found)


def with_payload(folder: Path, mark: Path, name: str = WEIGHT) -> bytes:
    """A weight of which the archive holds a program instead of a tensor."""
    found, payload = metadata(folder), saved(Payload(mark))
    index = next(index for index in found.storage_data if index.fqn == name)
    info = found.storage_data[index]
    path = folder / info.relative_path
    found.storage_data[index] = replace(info, offset=path.stat().st_size, length=len(payload))
    path.write_bytes(path.read_bytes() + payload)
    return pickle.dumps(found)


METADATA = {
    "a program": (lambda folder, mark: pickle.dumps(Payload(mark)), "asks for builtins.exec"),
    "protocol 0": (lambda folder, mark: pickle.dumps(Payload(mark), 0), "asks for __builtin__.exec"),
    "protocol 5": (lambda folder, mark: pickle.dumps(Payload(mark), 5), "asks for builtins.exec"),
    "a program inside": (with_planner_data, "asks for builtins.exec"),
    "by a dotted name": (
        lambda folder, mark: by_name("torch", "serialization.os.system", f"touch {mark}"),
        "asks for torch.serialization.os.system",
    ),
    "by a function of torch": (lambda folder, mark: by_name("torch", "load", str(mark)), "asks for torch.load"),
    "by a getter": (lambda folder, mark: by_name("builtins", "getattr", "x"), "asks for builtins.getattr"),
    "an object for a weight": (with_object, f"calls {WEIGHT} an object"),
    "a path out of the folder": (lambda folder, mark: with_path(folder, "../../x.distcp"), "outside of the folder"),
    "an absolute path": (lambda folder, mark: with_path(folder, "/etc/passwd"), "outside of the folder"),
}
COMMON = {
    "a program": (lambda mark: saved({"extra": Payload(mark)}), "asks for builtins.exec"),
    "a program in the state of a run": (
        lambda mark: saved({"optimizer": {}, "extra": {"step": 1, "rollouts": [{"a": Payload(mark)}]}}),
        "asks for builtins.exec",
    ),
    "an old archive": (
        lambda mark: saved({"extra": Payload(mark)}, _use_new_zipfile_serialization=False),
        "not what torch.save writes",
    ),
    "a bare pickle": (lambda mark: pickle.dumps(Payload(mark)), "not what torch.save writes"),
    "strings for names": (
        lambda mark: archive(by_name("builtins", "exec", hostile.code(mark))),
        "not what torch.save writes",
    ),
    "a shell": (lambda mark: archive(shell(mark)), "asks for posix.system"),
    "compressed": (lambda mark: compressed(saved({"extra": {}})), "not what torch.save writes"),
    "no dict": (lambda mark: saved([1]), "where a dict should stand"),
    "TorchScript": (lambda mark: torchscript(), "not what torch.save writes"),
}


def shell(mark: Path) -> bytes:
    command = f"touch {mark}".encode()
    return b"\x80\x02cposix\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85R."


def compressed(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


def torchscript() -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), file)
    return file.getvalue()


def refused(capsys, inputs: Path, *more: str) -> str:
    """The one line in which a run ends."""
    capsys.readouterr()
    status = launch.main("sft", [*overrides(inputs), *more])
    err = capsys.readouterr().err
    assert status == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("isoloss: ")]
    assert "Traceback" not in err
    return line


@pytest.mark.parametrize(("make", "said"), METADATA.values(), ids=METADATA.keys())
def test_metadata(make, said, checkpoint, mark, inputs, capsys):
    """Of a run that goes on. Without the look at it torch would unpickle it, and do what it asks for."""
    data = make(checkpoint, mark)
    (checkpoint / ".metadata").write_bytes(data)
    hostile.sign(checkpoint)
    line = refused(capsys, inputs, "checkpoint.resume=true", "train.steps=2")
    assert f"{checkpoint}/.metadata" in line and said in line
    assert not mark.exists() and not Path("out/checkpoints/step_00000002").exists()


@pytest.mark.parametrize(("make", "said"), METADATA.values(), ids=METADATA.keys())
def test_metadata_of_a_source_of_weights(make, said, checkpoint, mark, inputs, capsys):
    data = make(checkpoint, mark)
    (checkpoint / ".metadata").write_bytes(data)
    hostile.sign(checkpoint)
    refused(capsys, inputs, f"model.path={checkpoint}", "model.from_scratch=false", "output_dir=other")
    assert not mark.exists() and not Path("other").exists()


@pytest.mark.parametrize("forced", (False, True))
@pytest.mark.parametrize(("make", "said"), COMMON.values(), ids=COMMON.keys())
def test_common_state(make, said, forced, checkpoint, mark, inputs, capsys, monkeypatch):
    """forced: by a variable that takes torch's own limit away."""
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (checkpoint / "common.pt").write_bytes(make(mark))
    hostile.sign(checkpoint)
    line = refused(capsys, inputs, "checkpoint.resume=true", "train.steps=2")
    assert f"{checkpoint}/common.pt" in line and said in line
    assert not mark.exists()


def test_a_tensor_that_is_a_program(checkpoint, mark, inputs, capsys):
    """Read as a source of weights, and where a run goes on."""
    (checkpoint / ".metadata").write_bytes(with_payload(checkpoint, mark))
    hostile.sign(checkpoint)
    line = refused(capsys, inputs, f"model.path={checkpoint}", "model.from_scratch=false", "output_dir=other")
    assert "__0_" in line and "exec has no place in a tensor" in line
    line = refused(capsys, inputs, "checkpoint.resume=true", "train.steps=2")
    assert f"where {WEIGHT} should stand (__builtin__.exec has no place in a tensor)" in line and "do not use" in line
    assert not mark.exists()


# ---- what lasts from one reading to the next -------------------------------------------------------------------------


def state_of_the_process() -> list[object]:
    """What a pickle of the format could reach: names by identity, and what was set on them."""
    layout = torch.serialization._get_layout
    shared = (layout, pathlib.PosixPath, argparse.Namespace, dcp_metadata.Metadata, dcp_metadata.MetadataIndex,
              dcp_metadata.StorageMeta, filesystem._StorageInfo, planner.SavePlan)  # fmt: skip
    return [sorted((key, repr(value)) for key, value in vars(each).items() if key != "cache") for each in shared] + [
        sorted(map(str, layout.cache.values())) if layout.cache else [],
        pickle.dumps(torch.strided),
    ]


@pytest.fixture
def unchanged():
    """The process is, after the test, what it was before; it is put back, for the other tests, where it is not."""
    layout = torch.serialization._get_layout
    pickle.loads(pickle.dumps(TensorProperties()))  # torch fills its cache
    cache, shared = layout.cache, (dcp_metadata.StorageMeta, argparse.Namespace, tensor_archive._describe)
    kept, before = [dict(vars(each)) for each in shared], state_of_the_process()
    yield
    after = state_of_the_process()
    layout.cache = cache
    for each, attributes in zip(shared, kept):
        for key in set(vars(each)) - set(attributes):
            delattr(each, key)
    assert after == before


def resume_thrice(inputs: Path) -> None:
    """In one process, as an attack that waits for some readings needs it."""
    for _ in range(3):
        launch.main("sft", [*overrides(inputs), "checkpoint.resume=true", "train.steps=2"])
        if Path("out/checkpoints/step_00000002").exists():
            shutil.rmtree("out/checkpoints/step_00000002")


@pytest.mark.parametrize("harmless", (1, 2, 3))
def test_metadata_that_is_harmless_at_first(harmless, checkpoint, mark, inputs, capsys, unchanged):
    """By an attribute of a function that all readings share. What is read once is what is used."""
    path = checkpoint / ".metadata"
    path.write_bytes(hostile_pickles.after_readings(path.read_bytes(), mark, harmless))
    hostile.sign(checkpoint)
    resume_thrice(inputs)
    assert not mark.exists()
    line = refused(capsys, inputs, "checkpoint.resume=true", "train.steps=2")
    assert f"{path} " in line and "asks for" in line


CHANGES = {
    "a function": ("torch.serialization", "_get_layout", {"cache": {}}),
    "a class": ("torch.distributed.checkpoint.metadata", "StorageMeta", {"planted": 1}),
    "the state of a class": ("torch.distributed.checkpoint.metadata", "StorageMeta", {"__setstate__": 1}),
    "what is not a field": ("torch.distributed.checkpoint.metadata", "MetadataIndex", {"fqn": "a", "planted": 1}),
}


@pytest.mark.parametrize(("module", "attribute", "state"), CHANGES.values(), ids=CHANGES.keys())
def test_metadata_that_changes_what_is_shared(module, attribute, state, checkpoint, inputs, capsys, unchanged):
    path = checkpoint / ".metadata"
    target = hostile_pickles.name(module, attribute)
    pickled = hostile_pickles.plain((None, state))
    if attribute == "MetadataIndex":  # of a fresh instance
        target, pickled = target + b")\x81", hostile_pickles.plain(state)
    program = hostile_pickles.build(target, pickled)
    path.write_bytes(hostile_pickles.with_program(path.read_bytes(), program))
    hostile.sign(checkpoint)
    assert f"{path} " in refused(capsys, inputs, "checkpoint.resume=true", "train.steps=2")


BOMBS = {
    "an index of a memo": b"\x80\x02Nr\x00\x00\x00\x08.",
    "a frame": b"\x80\x04\x95" + (1 << 62).to_bytes(8, "little") + b"N.",
    "a string": b"\x80\x04\x8d" + (1 << 31).to_bytes(8, "little") + b"x.",
    "sizes from one tuple": b"\x80\x04(" + b"K\x01" * 50_000 + b"t\x94\x85\x940"
    + (hostile_pickles.name("torch", "Size") + b"h\x01R") * 2_000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("pickled", BOMBS.values(), ids=BOMBS.keys())
def test_metadata_that_takes_memory(pickled, checkpoint, inputs, capsys):
    (checkpoint / ".metadata").write_bytes(pickled)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"\.metadata "):
        Folder(checkpoint)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def of_fields(**fields: bytes) -> bytes:
    """A pickle of metadata with these fields."""
    state = b"}" + b"".join(hostile_pickles.plain(field) + value + b"s" for field, value in fields.items())
    return hostile_pickles.name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81" + state + b"b."


NO_TENSORS = {"state_dict_metadata": b"}", "storage_data": b"}"}
INDEX = hostile_pickles.name("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81"
OPCODES = {
    "an extension": b"\x80\x02\x82\x01.", "a long extension": b"\x80\x02\x84\x01\x00\x00\x00.",
    "INST": b"(iposix\nsystem\n.", "OBJ": b"(" + hostile_pickles.name("torch", "Size") + b"o.",
    "NEWOBJ_EX": hostile_pickles.name("torch", "Size") + b")}\x92.", "a name of its own": b"N\x51.",
    "a line for a name": b"Px\n.", "a string that is called": b"X\x01\x00\x00\x00x)R0" + of_fields(**NO_TENSORS),
    "a number of a kilobyte": b"\x8b\x00\x04\x00\x00" + bytes(1024) + b"0" + of_fields(**NO_TENSORS),
    "a state twice": INDEX + 2 * (hostile_pickles.plain({"fqn": "a"}) + b"b") + b"0" + of_fields(**NO_TENSORS),
    "a field of another type": INDEX + hostile_pickles.plain({"fqn": 1}) + b"b0" + of_fields(**NO_TENSORS),
    "an entry that is none": of_fields(state_dict_metadata=b"}\x8c\x01aNs", storage_data=b"}"),
    "a field of its own": of_fields(**NO_TENSORS, planted=b"N"),
    # 2^24 parts to hash
    "a key of keys": b"}N" + b"2\x86" * 24 + b"Ns0" + of_fields(**NO_TENSORS),
}  # fmt: skip


@pytest.mark.parametrize("pickled", OPCODES.values(), ids=OPCODES.keys())
def test_metadata_of_other_opcodes(pickled, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(UserError, match=r"\.metadata "):
        Folder(tmp_path)


def test_metadata_without_tensors(tmp_path):
    """What the pickles above add to is read."""
    (tmp_path / ".metadata").write_bytes(of_fields(**NO_TENSORS))
    assert not Folder(tmp_path).tensors


def test_a_piece_at_a_negative_place(checkpoint):
    found = metadata(checkpoint)
    index = next(index for index in found.storage_data if index.fqn == WEIGHT)
    found.storage_data[index] = replace(found.storage_data[index], offset=-1)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(UserError, match="at a negative place"):
        Folder(checkpoint)


@pytest.mark.parametrize("reader", ("arguments", "tensor"))
def test_other_pickles_that_change_what_is_shared(reader, tmp_path, unchanged):
    """BUILD sets attributes of the class, or of the function, that the pickle names."""
    named = {"arguments": ("argparse", "Namespace"), "tensor": ("torch._utils", "_rebuild_tensor_v2")}[reader]
    program = hostile_pickles.build(hostile_pickles.name(*named), hostile_pickles.plain((None, {"planted": 1})))
    data = archive(b"\x80\x04" + program + b".")
    if reader == "arguments":
        (tmp_path / "common.pt").write_bytes(data)
        assert megatron_args.read_model(tmp_path) == {}
    else:
        with pytest.raises((pickle.UnpicklingError, TypeError, ValueError)):
            tensor_archive.locate(memoryview(data))
    assert not any("planted" in vars(each) for each in (argparse.Namespace, tensor_archive._describe))


# ---- files that are others once they were checked --------------------------------------------------------------------


@pytest.mark.parametrize("file", (".metadata", "common.pt"))
def test_what_was_checked_is_what_is_used(file, checkpoint, mark, inputs, monkeypatch):
    """Somebody puts another file in its place between the check and the load; a variable takes torch's limit away."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    value = Payload(mark) if file == ".metadata" else {"extra": Payload(mark)}
    data = pickle.dumps(value) if file == ".metadata" else saved(value)

    def swap(*args, **options):
        (checkpoint / file).write_bytes(data)
        return loading(*args, **options)

    loading = dist_checkpointing.load
    monkeypatch.setattr(dist_checkpointing, "load", swap)
    launch.main("sft", [*overrides(inputs), "checkpoint.resume=true", "train.steps=2"])
    assert not mark.exists() and Path("out/checkpoints/step_00000002").is_dir()


def test_torch_unpickles_nothing_of_a_checkpoint(checkpoint, inputs, monkeypatch):
    """While a run goes on from one: neither `.metadata` nor a tensor."""

    def refuse(*args, **options):
        raise AssertionError("torch unpickles")

    monkeypatch.setattr(filesystem.FileSystemReader, "read_metadata", refuse)
    monkeypatch.setattr(filesystem.FileSystemReader, "read_data", refuse)
    assert launch.main("sft", [*overrides(inputs), "checkpoint.resume=true"]) == 0


@pytest.mark.parametrize("name", ("../../elsewhere", "/etc/hostname", "huggingface/../../x", ".", ""))
def test_a_manifest_that_names_what_is_not_its_own(name, checkpoint, inputs, capsys):
    Path("elsewhere").write_text("x")
    found = manifest.read(checkpoint)
    files = {**found.files, name: manifest.FileRecord(1, f"{0x8CDC1683:08x}")}
    (checkpoint / manifest.NAME).write_text(replace(found, files=files).to_json())
    line = refused(capsys, inputs, "checkpoint.resume=true", "train.steps=2")
    assert f"{checkpoint}/isoloss.json names {name!r}" in line


# ---- the converter, and folders of other trainers --------------------------------------------------------------------


def convert_back(checkpoint: Path, out: Path, *more: str) -> int:
    return convert.main(["mcore-to-hf", "--checkpoint", str(checkpoint), "--out", str(out), *more])


@pytest.mark.parametrize(("make", "said"), METADATA.values(), ids=METADATA.keys())
def test_the_converter_runs_nothing_of_metadata(make, said, checkpoint, mark, capsys):
    data = make(checkpoint, mark)
    (checkpoint / ".metadata").write_bytes(data)
    hostile.sign(checkpoint)
    assert convert_back(checkpoint, Path("export"), "--verify") == 2
    assert not mark.exists() and not Path("export").exists()


def test_the_converter_runs_nothing_of_a_tensor(checkpoint, mark, capsys):
    (checkpoint / ".metadata").write_bytes(with_payload(checkpoint, mark))
    hostile.sign(checkpoint)
    assert convert_back(checkpoint, Path("export")) == 2
    assert "exec has no place in a tensor" in capsys.readouterr().err
    assert not mark.exists() and not Path("export").exists()


@pytest.mark.parametrize("name", ("../../../escaped.safetensors", "{here}/escaped.safetensors", "..", ""))
def test_the_converter_writes_into_its_folder_alone(name, checkpoint, tmp_path, capsys):
    """The names of files come from a list that a converted checkpoint brings along."""
    name = name.format(here=tmp_path)
    tensors = dict.fromkeys(hf_shapes(weight_map(read_architecture(checkpoint))), "F32")
    layout = {"files": {name: {"tensors": tensors, "metadata": {"format": "pt"}}}, "indexed": False}
    (checkpoint / "huggingface/shards.json").write_text(json.dumps(layout))
    hostile.sign(checkpoint)
    assert convert_back(checkpoint, tmp_path / "a/b/export") == 2
    assert f"{name!r} is no file of a folder" in capsys.readouterr().err
    assert not any(path.name == "escaped.safetensors" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("kind", ("archive", "strings for names", "a bare pickle"))
def test_arguments_of_megatron(kind, tmp_path, mark):
    """Read for what they tell of a model; a program among them is passed over, and does nothing."""
    arguments = argparse.Namespace(num_layers=2, hidden_size=8, secret=Payload(mark))
    data = {
        "archive": saved({"args": arguments}),
        "strings for names": archive(by_name("builtins", "exec", hostile.code(mark))),
        "a bare pickle": pickle.dumps({"args": arguments}),
    }[kind]
    (tmp_path / "common.pt").write_bytes(data)
    found = megatron_args.read_model(tmp_path)
    assert ("num_layers" in found) == (kind == "archive") and not mark.exists()


def test_arguments_without_names(tmp_path):
    state = {3: 1, "num_layers": 2}
    arguments = hostile_pickles.name("argparse", "Namespace") + b")\x81" + hostile_pickles.plain(state) + b"b"
    (tmp_path / "common.pt").write_bytes(archive(b"\x80\x04}" + hostile_pickles.plain("args") + arguments + b"s."))
    assert megatron_args.read_model(tmp_path) == {}


def test_yaml_of_megatron_bridge(tmp_path, mark):
    path = tmp_path / "run_config.yaml"
    path.write_text(f"model: !!python/object/apply:builtins.exec [{hostile.code(mark)!r}]\n")
    with pytest.raises(UserError, match=r"run_config.yaml is damaged or not Megatron-Bridge's"):
        recorded_config.hf_model(tmp_path)
    path.write_text("model:\n  _target_: os.system\n  hf_model_id: {_target_: os.system, command: 'touch mark'}\n")
    assert "os.system" in str(recorded_config.hf_model(tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize("said", ("../../elsewhere", "/etc", "release/../..", "1; touch mark"))
def test_a_tracker_names_a_checkpoint_of_its_folder(said, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(said)
    with pytest.raises(UserError, match="where the number of an iteration should stand"):
        checkpoint_folder(tmp_path)


def test_a_checkpoint_of_links_is_read(checkpoint, trained):
    """A link to a file is a file: stores of large files are made of them."""
    for path in checkpoint.glob("*.distcp"):
        path.unlink()
        os.symlink(trained / "checkpoints/step_00000001" / path.name, path)
    assert WEIGHT in Folder(checkpoint).tensors
