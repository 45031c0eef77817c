"""The doctor names what is broken in a set-up, and nothing else; a healthy one has status 0.

A set-up is packages that consist of metadata, modules that only import, and a script for nvidia-smi.
"""

import shutil
import socket
from collections.abc import Callable

import pytest
from cli.stub_environment import StubEnvironment, stub_server

from isoloss.tools.doctor import __main__ as doctor

GIB = 1 << 30
SGLANG = {"version": "0.5.23", "device": "cuda", "tp_size": 1}


@pytest.fixture
def environment(tmp_path) -> StubEnvironment:
    return StubEnvironment(tmp_path)


@pytest.fixture(scope="module")
def of_this_machine() -> set[str]:
    """A container's shared memory may be too small indeed."""
    return {"shared memory"} if shutil.disk_usage("/dev/shm").total < GIB else set()


def test_a_healthy_one(environment, of_this_machine):
    told = environment.doctor("--output-dir", "not/there/yet")
    assert set(told.problems) == of_this_machine and told.status == len(of_this_machine)
    values = {finding["what"]: finding["value"] for finding in told.findings}
    assert values["GPUs"] == "2 x NVIDIA H100" and values["driver"] == "580.65.06"
    assert values["torch"] == "2.13.0, built for CUDA 13.0" and values["NCCL"] == "2.29.7"
    assert values["Transformer Engine"] == "2.11.0" and values["Megatron-Core"] == "0.16.1"
    assert values["packages"].startswith("1 more")
    assert len(told.lines) == len(told.findings) + 2 and told.lines[-1].startswith(f"{len(of_this_machine)} problem(s)")
    for line, finding in zip(told.lines, told.findings):
        assert line.split()[0] == finding["level"] and finding["what"] in line and finding["fix"] in line


def broken(
    name: str, what: str, value: str, fix: str, change: Callable[[StubEnvironment], object], *arguments: str
) -> object:
    return pytest.param(what, value, fix, change, arguments, id=name)


BROKEN = [
    broken(
        "no torch", "torch", "not installed", "pip install torch==2.13.0",
        lambda e: (e.package("torch", None), e.package("nvidia-nccl-cu13", None)),
    ),
    broken(
        "an old torch", "torch", "2.10.0, built for CUDA 13.0", "needs 2.11 or newer",
        lambda e: e.torch("2.10.0"),
    ),
    broken(
        "an old driver", "driver", "535.104.05, older than the 580 that CUDA 13.0 needs", "install driver 580",
        lambda e: e.nvidia_smi("echo 'NVIDIA H100, 535.104.05'"),
    ),
    broken(
        "a driver that fails", "GPUs", "couldn't communicate with the NVIDIA driver", "the NVIDIA driver",
        lambda e: e.nvidia_smi("echo \"nvidia-smi couldn't communicate with the NVIDIA driver\"; exit 9"),
    ),
    broken(
        "the CPU build", "CPU fallback", "2 GPU(s) of nvidia-smi: Torch not compiled with CUDA", "built for CUDA",
        lambda e: e.torch("2.13.0+cpu", cuda=None),
    ),
    broken(
        "no NCCL", "NCCL", "not installed, and torch 2.13.0 loads 2.29.7", "nvidia-nccl-cu13==2.29.7",
        lambda e: e.package("nvidia-nccl-cu13", None),
    ),
    broken(
        "an old NCCL", "NCCL", "2.9.8, older than the 2.29.7", "nvidia-nccl-cu13==2.29.7",
        lambda e: e.package("nvidia-nccl-cu13", "2.9.8"),
    ),
    broken(
        "a known Megatron-Core", "Megatron-Core", "0.19.2: not usable", "megatron-core==0.16.1",
        lambda e: e.package("megatron-core", "0.19.2"),
    ),
    broken(
        "an unknown Megatron-Core", "Megatron-Core", "0.12.0: not known", "megatron-core==0.16.1",
        lambda e: e.package("megatron-core", "0.12.0"),
    ),
    broken(
        "an old Transformer Engine", "Transformer Engine", "2.8.0; Megatron-Core 0.16.1 asks for", "<2.12",
        lambda e: e.package("transformer-engine", "2.8.0"),
    ),
    broken(
        "a Transformer Engine of another torch", "Transformer Engine", "undefined symbol: _ZN3c10", "build it",
        lambda e: e.module("transformer_engine/pytorch.py", "raise ImportError('undefined symbol: _ZN3c10')"),
    ),
    broken(
        "a Transformer Engine that crashes", "Transformer Engine", "killed by signal 6", "build it for this torch",
        lambda e: e.module("transformer_engine/pytorch.py", "import os\nos.abort()"),
    ),
    broken(
        "another apex", "apex", "is not NVIDIA's", "pip uninstall apex",
        lambda e: e.module("apex/forms.py"),
    ),
    broken(
        "SGLang beside the trainer", "SGLang", "it needs torch==2.14.1: here is 2.13.0", "an environment of their own",
        lambda e: e.package("sglang", "0.5.23", "torch==2.14.1", 'torch==2.0; extra == "old"'),
    ),
    broken(
        "a missing package", "numpy", "not installed", "pip install 'numpy>=1.26'",
        lambda e: e.package("numpy", None),
    ),
    broken(
        "an old package", "numpy", "1.9.0; isoloss requires >=1.26", "pip install 'numpy>=1.26'",
        lambda e: e.package("numpy", "1.9.0"),
    ),
    broken(
        "a full disk", "disk", "of 1e+09 GiB wanted", "another output_dir",
        lambda e: None, "--free-gib", "1e9",
    ),
    broken(
        "a file for a folder", "disk", "cannot be written to", "another output_dir",
        lambda e: (e.folder / "file").touch(), "--output-dir", "file/runs",
    ),
    broken(
        "no server", "http://127.0.0.1:1", "no answer", "start a server there",
        lambda e: None, "--servers", "http://127.0.0.1:1/",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("what", "value", "fix", "change", "arguments"), BROKEN)
def test_a_broken_one_is_named(what, value, fix, change, arguments, environment, of_this_machine):
    change(environment)
    told = environment.doctor(*arguments)
    assert told.status == 1 and set(told.problems) == {what} | of_this_machine
    assert value in told.problems[what]["value"] and fix in told.problems[what]["fix"]
    (line,) = [line for line in told.lines if line.startswith("problem") and what in line]
    assert value in line and fix in line


def test_a_port_that_is_taken(environment, of_this_machine):
    with socket.socket() as theirs, socket.socket() as unused:
        theirs.bind(("127.0.0.1", 0))
        theirs.listen()
        unused.bind(("127.0.0.1", 0))
        taken, free = theirs.getsockname()[1], unused.getsockname()[1]
        unused.close()
        told = environment.doctor("--port", str(free), str(taken))
    assert told.status == 1 and set(told.problems) == {f"port {taken}"} | of_this_machine
    assert "in use" in told.problems[f"port {taken}"]["value"] and told.of(f"port {free}")[0]["level"] == "ok"


def test_servers_of_another_nccl(environment, of_this_machine):
    with stub_server(SGLANG) as url:
        told = environment.doctor("--servers", url)
        for way in ("tensor", "disk"):
            assert set(environment.doctor("--servers", url, "--weight-sync", way).problems) == of_this_machine
    finding = told.problems.pop(f"NCCL with {url}")
    assert told.status == 1 and "2.29.7 here, 2.30.7 with SGLang 0.5.23" in finding["value"]
    assert "rollout.weight_sync=tensor" in finding["fix"] and "or disk" in finding["fix"]
    assert told.of(url)[0]["value"] == "SGLang 0.5.23, cuda"


@pytest.mark.parametrize(
    ("info", "endpoint", "torch", "nccl", "level"),
    [
        (SGLANG, "/get_server_info", "2.14.1", "2.30.7", "ok"),
        (SGLANG, "/server_info", "2.13.0", "2.30.7", "ok"),
        (SGLANG, "/server_info", "2.13.0", "2.31.1", "note"),  # chosen, for servers of a container image
        (SGLANG | {"version": "0.5.5"}, "/server_info", "2.13.0", "2.29.7", "note"),
        ({"device": "cuda"}, "/server_info", "2.13.0", "2.29.7", "note"),
        (SGLANG | {"device": "cpu"}, "/server_info", "2.13.0", "2.29.7", None),  # gloo
    ],
)
def test_servers_that_may_do(info, endpoint, torch, nccl, level, environment, of_this_machine):
    environment.torch(torch, nccl=min(nccl, "2.30.7"))
    environment.package("nvidia-nccl-cu13", nccl)
    with stub_server(info, endpoint) as url:
        told = environment.doctor("--servers", url)
    assert set(told.problems) == of_this_machine
    assert [finding["level"] for finding in told.of(f"NCCL with {url}")] == ([level] if level else [])


@pytest.mark.parametrize("script", [None, "exit 0", "echo 'No devices were found'; exit 6"])
def test_without_a_gpu_torch_is_not_imported(script, environment):
    environment.torch(cuda=None)
    environment.module("torch/__init__.py", "raise AssertionError")
    environment.module("transformer_engine/pytorch.py", "raise ImportError('libcuda.so.1')")
    environment.nvidia_smi(script)
    told = environment.doctor()
    assert told.status == 0
    assert told.of("GPUs")[0]["level"] == "note" and "on the CPU" in told.of("GPUs")[0]["value"]
    assert [finding["level"] for finding in told.of("Transformer Engine")] == ["ok", "note"]


def test_gpus_of_two_kinds_are_noted(environment, of_this_machine):
    environment.nvidia_smi("echo 'NVIDIA H100, 580.65.06'; echo 'NVIDIA A100, 40GB, 580.65.06'")
    told = environment.doctor()
    assert set(told.problems) == of_this_machine
    (finding,) = told.of("GPUs")
    assert finding["level"] == "note" and finding["value"] == "1 x NVIDIA H100, 1 x NVIDIA A100, 40GB"


def test_each_usable_megatron_is(environment, of_this_machine):
    environment.package("megatron-core", "0.17.1")
    told = environment.doctor()
    assert set(told.problems) == of_this_machine
    (finding,) = told.of("Megatron-Core")
    assert finding["level"] == "ok" and finding["value"].startswith("0.17.1; ")


def test_newer_than_what_was_tried_is_noted(environment, of_this_machine):
    environment.torch("2.14.1+cu130", nccl="2.30.7")
    environment.package("nvidia-nccl-cu13", "2.30.8")
    environment.package("transformer-engine", "2.12.0")
    told = environment.doctor()
    assert set(told.problems) == of_this_machine
    levels = {finding["what"]: finding["level"] for finding in told.findings}
    assert levels["torch"] == levels["NCCL"] == levels["Transformer Engine"] == "note"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--port", "70000"], "70000 is not a port"),
        (["--servers", "node1:30000"], "node1:30000 is not a URL"),
        (["--weight-sync", "carrier"], "'broadcast', 'tensor', 'disk'"),
    ],
)
def test_a_mistake_in_the_arguments(argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(argv)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1 and says in err


def test_a_report_that_cannot_be_written(tmp_path, capsys):
    assert doctor.main(["--json", str(tmp_path / "no/report.json"), "--output-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("isoloss: error: --json=") and err.count("\n") == 1
