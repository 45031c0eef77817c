"""An environment of a run as a doctor sees it: metadata of packages, modules to import, a driver. Nothing works."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import packaging

ROOT = Path(__file__).parents[2]
TORCH = """
from types import SimpleNamespace
__version__ = {version!r}
def init():
    raise RuntimeError("Torch not compiled with CUDA enabled")
cuda = SimpleNamespace(is_available=lambda: {sees_gpu}, init=init)
"""


@dataclass(frozen=True)
class Told:
    """status: of the command. lines: that it printed. findings: that it wrote as JSON."""

    status: int
    lines: list[str]
    findings: list[dict[str, str]]

    @property
    def problems(self) -> dict[str, dict[str, str]]:
        return {finding["what"]: finding for finding in self.findings if finding["level"] == "problem"}

    def of(self, what: str) -> list[dict[str, str]]:
        return [finding for finding in self.findings if finding["what"] == what]


class StubEnvironment:
    """Healthy as it is made: two GPUs, a driver, and every package that goes with torch 2.13.0."""

    def __init__(self, folder: Path):
        self.folder, self.site, self.bin = folder, folder / "site", folder / "bin"
        for path in (self.site / "isoloss", self.bin):
            path.mkdir(parents=True)
        for part in ("engine", "models", "parallel", "recipes", "tools"):
            (self.site / "isoloss" / part).symlink_to(ROOT / part)
        (self.site / "packaging").symlink_to(Path(packaging.__file__).parent)
        self.torch()
        self.package("nvidia-nccl-cu13", "2.29.7")
        self.package("megatron-core", "0.16.1")
        self.package("transformer-engine", "2.11.0")
        self.module("transformer_engine/pytorch.py")
        self.package("numpy", "2.4.6")
        self.package("isoloss", "0.1.0", "torch>=2.11", "megatron-core==0.16.1", "numpy>=1.26", 'ruff; extra == "dev"')
        self.nvidia_smi("echo 'NVIDIA H100, 580.65.06'; echo 'NVIDIA H100, 580.65.06'")

    def package(self, name: str, version: str | None, *needs: str) -> None:
        """Install one in the place of any of that name; with version=None none."""
        for older in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(older)
        if version is not None:
            info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]) + "\n")

    def module(self, path: str, source: str = "") -> None:
        file = self.site / path
        file.parent.mkdir(exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(source)

    def torch(self, version: str = "2.13.0", cuda: str | None = "13.0", nccl: str = "2.29.7") -> None:
        pins = [f'nvidia-nccl-cu13=={nccl}; platform_system == "{sys.platform.capitalize()}"'] if cuda else []
        self.package("torch", version, "filelock", *pins)
        self.module("torch/version.py", f"hip: str | None = None\ncuda: str | None = {cuda!r}\n")
        self.module("torch/__init__.py", TORCH.format(version=version, sees_gpu=cuda is not None))

    def nvidia_smi(self, script: str | None) -> None:
        command = self.bin / "nvidia-smi"
        command.unlink(missing_ok=True)
        if script is not None:
            command.write_text(f"#!/bin/sh\n{script}\n")
            command.chmod(0o755)

    def doctor(self, *arguments: str) -> Told:
        """In a process that sees these packages alone."""
        report = self.folder / "report.json"
        command = [sys.executable, "-S", "-m", "isoloss.tools.doctor", "--free-gib", "0", "--json", str(report)]
        environment = {"PYTHONPATH": str(self.site), "PATH": str(self.bin), "HOME": os.environ.get("HOME", "/")}
        done = subprocess.run(
            [*command, *arguments], cwd=self.folder, env=environment, text=True, capture_output=True, check=False
        )
        assert done.returncode in (0, 1) and done.stderr == "", done.stderr
        written = json.loads(report.read_text())
        assert written["status"] == done.returncode
        return Told(done.returncode, done.stdout.splitlines(), written["findings"])


@contextmanager
def stub_server(info: Any, endpoint: str = "/server_info") -> Iterator[str]:
    """The URL of a server that tells `info` of itself there, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == endpoint
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps(info).encode() if found else b"{}")

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
