"""A server of the Tinker API, in processes of its own, and the environment of its clients."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isoloss.tools.prove.serve.server import Server

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".tinker-venv/bin/python"


@contextmanager
def served(folder: Path, *words: str) -> Iterator[Server]:
    """Start a server of the shipped model, unless the words name another one, and end it as its user would."""
    with Server(("preset=tiny", *words), folder) as server:
        server.wait_ready()
        yield server
    assert server.status == 0 and not server.repeated_otherwise()


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
