"""Keep tokenized rows on disk, in a folder named by a hash of all that they depend on, and load them as memory maps."""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np

from isoloss.engine.data.bad_rows import Reject
from isoloss.engine.data.files.kinds import kind_of
from isoloss.engine.data.token_dataset import ARRAYS, DataStats, TokenDataset
from isoloss.parallel.runtime.errors import UserError

FORMAT = 7  # version of the folder's files and of the tokenization; folders of other versions are not read


def cache_key(paths: Sequence[str], tokenizer_dir: str, **options) -> str:
    """Return the name of the cache folder: a hash of all that the tokens depend on, contents of files but no names."""
    tokenizer_files = tokenizer_configuration(Path(tokenizer_dir))
    parts = {
        "format": FORMAT,
        "versions": [version("transformers"), version("tokenizers")],
        # The name decides how a file is parsed. The order of the files is that of the rows.
        "data": [[kind.name if (kind := kind_of(path)) else "", file_hash(Path(path))] for path in paths],
        "tokenizer": {str(path.relative_to(tokenizer_dir)): file_hash(path) for path in tokenizer_files},
        "options": options,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_configuration(folder: Path) -> list[Path]:
    """Return the files of a model folder that a tokenizer may read: no weights, and no index of weights."""
    suffixes = (".json", ".jinja", ".model", ".txt", ".tiktoken")
    if not folder.is_dir():
        return []
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")]
    return sorted(p for p in files if p.name.endswith(suffixes) and not p.name.endswith(".index.json"))


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_cache(folder: Path, dataset: TokenDataset) -> None:
    """Write the cache folder under a name of this process, then rename it: a folder under its final name is complete.

    Raises UserError, and leaves no file, if the disk refuses.
    """
    temporary = folder.with_name(f".{folder.name}.{platform.node()}-{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process of the same number
    try:
        _fill(temporary, dataset)
    except OSError as problem:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"tokenized rows could not be written into data.cache_dir={folder.parent} ({problem}): make room there, or "
            "set data.cache_dir to another place"
        ) from None
    if load_cached(folder, dataset.paths) is None:
        aside = temporary.with_suffix(".damaged")
        with contextlib.suppress(OSError):  # there is no damaged folder
            os.rename(folder, aside)
        with contextlib.suppress(OSError):
            # A machine that shares this file system has written it since, and may be reading it.
            if load_cached(aside, dataset.paths) is not None:
                os.rename(aside, folder)
        with contextlib.suppress(OSError):  # another machine was faster and wrote the same contents
            os.rename(temporary, folder)
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


def _fill(folder: Path, dataset: TokenDataset) -> None:
    """Write the arrays and meta.json, with the arrays' checksums, into a new folder."""
    folder.mkdir(parents=True)
    checksums = {}
    for name, dtype in ARRAYS.items():
        path = folder / f"{name}.npy"
        np.save(path, np.ascontiguousarray(getattr(dataset, name), dtype))
        checksums[name] = checksum(path)
    stats = asdict(dataset.stats)
    meta = {"format": FORMAT, "stats": stats, "fingerprint": dataset.fingerprint, "crc32": checksums}
    meta["rejects"] = [asdict(reject) for reject in dataset.rejects]
    meta |= {"unused": dataset.unused, "turn_ends": dataset.turn_ends}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def load_cached(folder: Path, paths: Sequence[str]) -> TokenDataset | None:
    """Return the data set of a cache folder, memory-mapped; None if the folder is missing, incomplete or damaged.

    paths: today's names of the files that were tokenized.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        for name in ARRAYS:
            if checksum(folder / f"{name}.npy") != meta["crc32"][name]:
                return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        return TokenDataset(
            **arrays,
            paths=tuple(paths),
            stats=DataStats(**meta["stats"]),
            fingerprint=meta["fingerprint"],
            rejects=tuple(Reject(**reject) for reject in meta["rejects"]),
            unused=tuple(meta["unused"]),
            turn_ends=meta["turn_ends"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, mode="r").data)


@contextlib.contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """Run the block in one process of this machine at a time, per cache folder. Raises UserError."""
    # The lock is in the system's temporary folder: a process that is killed while it waits (torchrun kills all ranks if
    # one fails) leaves no file where the run writes. Any user may write there, so the lock is in a folder of this user
    # alone, no link is followed, and the file is deleted afterwards.
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    path = own_temporary_folder() / f"{digest}.lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or the process dies
            if not is_of(lock, path):
                continue  # its holder has deleted the file since
            try:
                yield
            finally:
                path.unlink()
            return
        finally:
            os.close(lock)


def is_of(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def own_temporary_folder() -> Path:
    """Return a temporary folder that only this user may enter. Raises UserError if another user has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"isoloss-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder} is not a folder of yours alone: delete it, or set TMPDIR to another folder")
    return folder
