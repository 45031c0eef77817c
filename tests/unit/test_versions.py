"""The table of versions agrees with itself, with what isoloss requires, and with its page; and a machine is judged."""

import re
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from isoloss.engine.rl.config import RolloutConfig
from isoloss.models.mcore import transformer_engine
from isoloss.parallel.runtime import nvidia_smi, versions
from isoloss.parallel.runtime.config_key import choices_of
from isoloss.tools.doctor import __main__ as doctor
from isoloss.tools.doctor import machine, packages
from isoloss.tools.doctor.probe import failure_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDS = {need.name: need.specifier for need in map(Requirement, PROJECT["dependencies"])}
Usage = namedtuple("Usage", "total used free")


def test_the_page_is_what_the_table_says(capsys):
    assert doctor.main(["--versions"]) == 0
    told = "run python -m isoloss.tools.doctor --versions > docs/versions.md"
    assert (ROOT / "docs/versions.md").read_text() == capsys.readouterr().out, told


def test_it_agrees_with_what_isoloss_requires():
    assert NEEDS["torch"] == SpecifierSet(f">={versions.OLDEST_TORCH}")
    usable = {each.version for each in versions.MEGATRON_RELEASES if each.usable}
    released = {each.version for each in versions.MEGATRON_RELEASES} | {"0.16.0", "0.17.0", "0.18.0"}
    assert set(NEEDS["megatron-core"].filter(released)) == usable
    pinned = re.search(r"^megatron-core==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned and pinned[1] == versions.SUPPORTED_MEGATRON
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={'.'.join(map(str, versions.OLDEST_PYTHON))}")
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH ?= torch=={versions.TESTED_TORCH}\n" in makefile
    assert f"NEWER := megatron-core=={versions.NEWEST_MEGATRON}\n" in makefile
    assert {each.sglang for each in versions.SETS} == set(
        re.findall(r"^sglang==(.*)$", (ROOT / "tests/sglang/requirements.txt").read_text(), re.M)
    )
    (field,) = [f for f in RolloutConfig.__dataclass_fields__.values() if f.name == "weight_sync"]
    assert choices_of(field) == versions.WEIGHT_SYNCS


def test_sets_agree_with_the_releases_that_they_name():
    wheels = {each.version: each for each in versions.TORCH_WHEELS}
    servers = {each.sglang: each for each in versions.SERVER_RELEASES}
    megatron = {each.version: each for each in versions.MEGATRON_RELEASES}
    assert all(each.nccl == wheels[each.torch].nccl for each in servers.values())
    for row in versions.SETS:
        wheel = wheels[versions.public(row.torch)]
        release = megatron[row.megatron_core]
        assert row.sglang in servers and SpecifierSet(row.python) and row.run.endswith(".")
        if row.cuda is None:
            assert (row.nccl, row.driver, row.transformer_engine) == (None, None, None)
            continue
        assert (row.cuda, row.nccl, row.transformer_engine) == (wheel.cuda, wheel.nccl, release.transformer_engine)
        assert row.driver == versions.OLDEST_DRIVER[int(row.cuda.split(".")[0])]
        assert ("broadcast" in row.weight_syncs) == (row.nccl == servers[row.sglang].nccl)
        oldest = min(Version(each.version) for each in SpecifierSet(row.transformer_engine))
        assert oldest == transformer_engine.OLDEST


@pytest.mark.parametrize(
    ("torch", "nccl", "sglang", "theirs"),
    [
        ("2.13.0", "2.29.7", "0.5.23", "2.30.7"),
        ("2.13.0+cu130", "2.29.7", "0.5.23", "2.30.7"),
        ("2.14.1", "2.30.7", "0.5.23", None),
        ("2.13.0", "2.30.7", "0.5.23", None),
        ("2.13.0", "2.28.3", "0.5.23", None),  # chosen to be that of the servers' container image
        ("2.13.0", "2.29.7", "0.5.5", None),
        ("2.13.0", "2.29.7", None, None),
        ("2.13.0", None, "0.5.23", None),
        ("2.99.0", None, "0.5.23", None),
        ("2.99.0", "2.29.7", "0.5.23", None),
    ],
)
def test_which_servers_no_group_is_formed_with(torch, nccl, sglang, theirs):
    assert versions.foreign_nccl(torch, nccl, sglang) == theirs


@pytest.mark.parametrize("version, level", [((3, 10, 14), "problem"), ((3, 11, 0), "ok"), ((3, 13, 1), "ok")])
def test_an_old_python(version, level):
    finding = packages.check_python(version)
    assert finding.level == level and finding.value == ".".join(map(str, version))
    assert ("3.11" in finding.fix) == (level == "problem")


@pytest.mark.parametrize(
    ("size", "has_gpu", "level"),
    [(64 << 20, True, "problem"), (64 << 20, False, "note"), (1 << 30, True, "ok"), ((1 << 30) - 1, True, "problem")],
)
def test_small_shared_memory(size, has_gpu, level, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(size, 0, size))
    (finding,) = machine.check_shared_memory(has_gpu)
    assert finding.level == level and ("--shm-size" in finding.fix) == (level != "ok")


def test_limits(monkeypatch):
    limits = {machine.resource.RLIMIT_MEMLOCK: 64 << 10, machine.resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (limits[which], limits[which]))
    assert [(f.level, f.value) for f in machine.check_limits()] == [("note", "64 KiB"), ("note", "1024")]
    limits = dict.fromkeys(limits, machine.resource.RLIM_INFINITY)
    assert [(f.level, f.value) for f in machine.check_limits()] == [("ok", "unlimited")] * 2


@pytest.mark.parametrize(
    ("version", "cuda", "level"),
    [("580.65.06", "13.0", "ok"), ("579.99", "13.0", "problem"), ("535.1", "12.8", "ok"), ("580.1", "14.0", "note")],
)
def test_drivers(version, cuda, level):
    assert machine.check_driver(version, cuda).level == level


def test_a_driver_that_hangs(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(nvidia_smi, "SECONDS", 0.2)
    assert nvidia_smi.read_driver() == nvidia_smi.Driver(failure="no answer in 0.2 seconds")


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("", None),
        ("import sys; print('talk', file=sys.stderr)", None),
        ("import sys; print('talk', file=sys.stderr); sys.exit('reason')", "reason"),
        ("raise SystemExit(3)", "status 3"),
    ],
)
def test_why_a_piece_of_python_fails(code, failure):
    assert failure_of(code) == failure
