"""The driver and its GPUs as nvidia-smi lists them. Imports no torch."""

import shutil
import subprocess
from dataclasses import dataclass

SECONDS = 60.0  # nvidia-smi can hang if a GPU has fallen off its bus


@dataclass(frozen=True)
class Driver:
    """The answer of nvidia-smi.

    gpus: names of the GPUs, in order.
    version: version of the driver; None without a GPU.
    failure: message of nvidia-smi if it ended with an error, else empty.
    """

    gpus: tuple[str, ...] = ()
    version: str | None = None
    failure: str = ""


def read_driver() -> Driver | None:
    """Run nvidia-smi and return its answer; None if there is no such command."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(
            query, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return Driver(failure=f"no answer in {SECONDS:g} seconds")
    if listed.returncode != 0:
        return Driver(failure=" ".join((listed.stdout + listed.stderr).split()) or f"status {listed.returncode}")
    rows = [line.rsplit(", ", 1) for line in listed.stdout.splitlines() if line.strip()]
    return Driver(tuple(row[0] for row in rows), rows[0][-1] if rows else None)
