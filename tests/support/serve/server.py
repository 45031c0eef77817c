"""A server of the Tinker API, in processes of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from support.runs.ports import free_port

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".tinker-venv/bin/python"


class Server:
    """A server of the shipped model, unless the words name another one. `folder`: what it writes."""

    def __init__(self, folder: Path, *words: str):
        port = free_port()
        self.folder, self.url, self.log = folder, f"http://127.0.0.1:{port}", folder.with_suffix(".log")
        command = [sys.executable, "-m", "isoloss.tools.serve", "preset=tiny", f"serve.port={port}"]
        command += [f"output_dir={folder}", *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def wait(self) -> None:
        """Wait until it is ready."""
        # However long: only pytest's limit ends a slow machine's start.
        while "ready" not in self.log.read_text():
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(self.log.read_text())

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a client."""
        return environment(self.url, (self.folder / "api_key").read_text().strip())

    def kill(self, module: str) -> None:
        """Kill the processes of a module with SIGKILL."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # one that has ended meanwhile
                if f"isoloss.tools.serve.{module}" in " ".join(child.cmdline()):
                    child.kill()

    def close(self) -> None:
        """End it as its user would, and check that it found nothing wrong with itself."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        assert "another result" not in self.log.read_text()


def environment(url: str, key: str) -> dict[str, str]:
    """Return the environment of a client that finds a server at a URL, and looks for nothing else in the network."""
    return {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
