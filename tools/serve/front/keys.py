"""API keys. Each is of an owner, who sees what was made with it and nothing else."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from isoloss.parallel.runtime.errors import UserError

PREFIX = "tml-"  # without it the SDK refuses a key before it sends anything


def read(file: str | None, folder: Path) -> tuple[str, ...]:
    """Return the keys of a file, or the key of `folder`, which is made if it is not there. Raises UserError."""
    path = folder / "api_key" if file is None else Path(file)
    if file is None and not path.exists():
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(f"{PREFIX}{secrets.token_hex(24)}\n")
    keys = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    for number, line in enumerate(keys, 1):
        if not line.startswith(PREFIX) or not line.isascii() or len(line) < len(PREFIX) + 4:
            raise UserError(
                f"{path}: key {number} must begin with {PREFIX} and be of ASCII letters, 4 or more after it"
            )
    if not keys:
        raise UserError(f"{path} has no key: write one in each line, which begins with {PREFIX}")
    return keys


def owner_of(given: str, keys: Sequence[str]) -> str | None:
    """Return the owner of a key, None if there is none; in the same time for every key."""
    found = None
    for key in keys:
        if hmac.compare_digest(given.encode(), key.encode()):
            found = hashlib.sha256(key.encode()).hexdigest()[:16]
    return found
