"""`tools.convert hf-to-mcore` as a user runs it: what it says, what it refuses, and that a kill does no harm."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.faults.faults import struck
from support.models.families import write_folder
from support.runs import warm

from isoloss.models.conversion import hf_to_mcore, transfer
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights import manifest
from isoloss.models.weights.hf_checkpoint import INDEX
from isoloss.models.weights.weight_map import hf_shapes, weight_map
from isoloss.tools.convert import __main__ as convert

POINTER = "version https://git-lfs.github.com/spec/v1"
COMMAND = (sys.executable, "-m", "isoloss.tools.convert", "hf-to-mcore")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Llama in several shards, each with the checksum that its download left."""
    folder = tmp_path / "in"
    write_folder("llama", folder, max_shard_size="60KB")
    records = folder / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    for path in folder.glob("*.safetensors"):
        (records / f"{path.name}.metadata").write_text(f"{'0' * 40}\n{sha256(path.read_bytes()).hexdigest()}\n1.7e9\n")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def main(folder: Path, out: Path, *more: str) -> int:
    return convert.main(["hf-to-mcore", "--hf", str(folder), "--out", str(out), *more])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_complete(out: Path, whole: dict[str, bytes] | None = None) -> None:
    manifest.check_checksums(out, manifest.read(out))
    assert whole is None or contents(out) == whole
    assert not out.with_name(f".{out.name}.partial").exists()


def test_a_conversion(folder, tmp_path):
    done = warm.run([*COMMAND, "--hf", folder, "--out", tmp_path / "out"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert "llama, 21 tensors used, 0 left out" in said[0] and "9 tensors, float32, stacked keys" in said[1]
    assert said[2].startswith("wrote 0.00 GB in ") and len(said) == 3
    check_complete(tmp_path / "out")


def test_a_dry_run_prints_the_plan_and_writes_nothing(folder, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main(folder, tmp_path / "out", "--dry-run", "--dtype", "bf16") == 0
    said = capsys.readouterr().out
    assert "9 tensors, bfloat16, stacked keys" in said and "__0_0.distcp" in said and manifest.NAME in said
    shards = len(list(folder.glob("*.safetensors")))
    assert f"{shards} of them with a published checksum" in said and shards > 3
    assert sorted(tmp_path.rglob("*")) == before


def test_help_tells_how(capsys):
    with pytest.raises(SystemExit) as ended:
        convert.main(["hf-to-mcore", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(option in said for option in ("--hf DIR", "--out DIR", "--dtype", "--dry-run", "--workers N"))


# ---- mistakes: what is done to the folder, given as arguments, and told ----------------------------------------------


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def flip_a_bit(folder: Path) -> None:
    data = bytearray(first_shard(folder).read_bytes())
    data[-50] ^= 16
    first_shard(folder).write_bytes(data)


def cut_short(folder: Path) -> None:
    first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-7])


def nothing(folder: Path) -> None:
    pass


MISTAKES = {
    "no folder": (shutil.rmtree, (), ("--hf", "is not a folder")),
    "no config.json": (lambda f: (f / "config.json").unlink(), (), ("--hf", "has no config.json")),
    "no weights": (
        lambda f: [path.unlink() for path in f.glob("model*")], (), ("has neither", "give a folder with safetensors")),
    "a checkpoint": (
        lambda f: [(f / "config.json").unlink(), (f / ".metadata").touch()], (), ("mcore-to-hf converts it",)),
    "broken generation_config.json": (
        lambda f: (f / "generation_config.json").write_text("[]"), (), ("generation_config.json", "must hold a JSON")),
    "a pointer of Git LFS": (
        lambda f: first_shard(f).write_text(f"{POINTER}\noid sha256:0\n"), (), ("model-00001-of", "run git lfs pull")),
    "broken config.json": (lambda f: (f / "config.json").write_text("{"), (), ("config.json", "not valid JSON")),
    "binary config.json": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), (), ("config.json", "not valid")),
    "another architecture": (
        lambda f: edit_config(f, architectures=["LlamaForCausallM"]), (), ("LlamaForCausallM", "did you mean")),
    "another field": (lambda f: edit_config(f, attention_sparsity=3), (), ("attention_sparsity=3", "delete it")),
    "another size": (lambda f: edit_config(f, vocab_size=299), (), ("embed_tokens.weight", "[307, 56]", "[299, 56]")),
    "fewer layers": (lambda f: edit_config(f, num_hidden_layers=1), (), ("model.layers.1.", "another model")),
    "a shard is missing": (lambda f: first_shard(f).unlink(), (), ("lacks model-00001", "finish the download")),
    "no index": (lambda f: (f / INDEX).unlink(), (), ("has neither", INDEX)),
    "broken index": (lambda f: (f / INDEX).write_text("[]"), (), (INDEX, "copy it again")),
    "a truncated shard": (cut_short, (), ("model-00001-of", "cut short", "download it again")),
    "a flipped bit": (flip_a_bit, (), ("model-00001-of", "is damaged: its sha256 is", "download it again")),
    "no --out": (nothing, None, ("--out", "--help")),
    "--out exists": (nothing, ("--out", "{folder}"), ("exists already", "choose another folder")),
    "--out below a file": (nothing, ("--out", "{folder}/config.json/out"), ("config.json", "Not a directory")),
    "another dtype": (nothing, ("--dtype", "int8"), ("--dtype", "int8", "bf16")),
    "no workers": (nothing, ("--workers", "0"), ("--workers", "at least 1")),
    "an unknown option": (nothing, ("--tp", "2"), ("--tp",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_writes_nothing(folder, tmp_path, capfd, name):
    spoil, arguments, says = MISTAKES[name]
    spoil(folder)
    before = contents(tmp_path)
    command = ["hf-to-mcore", "--hf", str(folder)]
    if arguments is not None:
        command += ["--out", str(tmp_path / "out"), *(text.format(folder=folder) for text in arguments)]
    capfd.readouterr()
    try:
        status = convert.main(command)
    except SystemExit as ended:
        status = ended.code
    said = capfd.readouterr().err
    assert status == 2 and len(said.splitlines()) == 1 and said.startswith("isoloss: error: "), said
    assert all(text in said for text in says), said
    assert contents(tmp_path) == before and not (tmp_path / ".out.partial").exists()


def test_a_mistake_ends_the_command_with_status_2(folder, tmp_path):
    done = subprocess.run([*COMMAND, "--hf", folder, "--out", folder], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"isoloss: error: {folder} exists already; choose another folder to write to, or delete it\n"


# ---- ended by force -------------------------------------------------------------------------------------------------


def test_killed_at_fifty_points_the_target_is_absent_or_complete_and_the_second_run_finishes(folder, tmp_path):
    plan = hf_to_mcore.plan(folder, file_bytes=100_000).transfer
    assert len([file for file in plan.files if file.name.endswith(".distcp")]) > 3
    ended, count = struck(partial(transfer.run, plan, tmp_path / "whole"), None)
    assert ended == "done" and count > 100
    whole = contents(tmp_path / "whole")
    published = 0
    for point in sorted({k * (count - 1) // 49 for k in range(50)}):
        out = tmp_path / f"out{point}"
        ended, _ = struck(partial(transfer.run, plan, out), point)
        assert ended == "killed" or point > count - 5, point  # the threads need a few operations more or less
        published += out.exists()
        if not out.exists():
            report = transfer.run(plan, out)
            assert report.nbytes == plan.nbytes
        elif ended == "killed":
            assert main(folder, out) == 2
        check_complete(out, whole)
    assert 0 < published < 25  # most of the points lie before the rename, some after it


def large_folder(folder: Path, megabytes: int) -> Path:
    """The Llama of `folder`, wider, with weights that are quickly made."""
    large = folder.with_name("large")
    large.mkdir()
    shutil.copy(folder / "config.json", large)
    edit_config(large, vocab_size=megabytes * (1 << 20) // (2 * 2 * 64))
    block = torch.randn(1 << 20).bfloat16()
    shapes = hf_shapes(weight_map(read_architecture(large)))
    tensors = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = block.repeat(-(-size // len(block)))[:size].reshape(shape).contiguous()
    save_file(tensors, large / "model.safetensors")
    return large


def test_the_command_killed_while_it_writes_goes_on_when_started_again(folder, tmp_path, capsys):
    large, out = large_folder(folder, 200), tmp_path / "out"
    with warm.Popen([*COMMAND, "--hf", large, "--out", out]) as process:
        records = tmp_path / ".out.partial" / "journal" / "files"
        deadline = time.monotonic() + 120
        while not list(records.glob("*.distcp.json")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
    assert not out.exists()
    assert main(large, out) == 0
    said = capsys.readouterr()
    assert "were there already" in said.out and said.err == ""
    check_complete(out)
    assert manifest.read(out).vocab_size == read_architecture(large).vocab_size


def test_a_disk_that_is_full_is_told_and_the_second_run_finishes(folder, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = hf_to_mcore.plan(folder).transfer.nbytes

    def mount(nbytes: int, *options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={nbytes}", *options]), "tmpfs", str(disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not mount(size // 2):
        pytest.skip("mounting a small disk takes root")
    try:
        assert main(folder, disk / "out") == 2
        told = capsys.readouterr().err
        assert "more bytes and" in told and "free; make room" in told and told.count("\n") == 1
        assert not os.listdir(disk)

        # Enough for the bytes, not for the ends of the files, which take whole pages.
        assert mount(-(-size // 4096) * 4096, "remount")
        assert main(folder, disk / "out") == 2
        told = capsys.readouterr().err
        assert "No space left on device" in told and "run the same command again" in told and told.count("\n") == 1
        assert not (disk / "out").exists()

        assert mount(2 * size + (1 << 20), "remount")
        assert main(folder, disk / "out") == 0
        check_complete(disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
