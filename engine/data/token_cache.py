"""Tokenized rows on disk, read back as memory maps: a folder whose name says all that the tokens depend on."""

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
from isoloss.engine.data.token_dataset import ARRAYS, DataStats, TokenDataset
from isoloss.parallel.runtime.errors import UserError

FORMAT = 6  # of the folder and of the tokenization; a new number leaves old folders unread


def cache_key(paths: Sequence[str], tokenizer_dir: str, **options) -> str:
    """Name of the cache folder: everything that the tokens depend on, file contents rather than names."""
    tokenizer_files = tokenizer_configuration(Path(tokenizer_dir))
    parts = {
        "format": FORMAT,
        "versions": [version("transformers"), version("tokenizers")],
        # A row's kind of file matters, and so does the order of the files.
        "data": [[Path(path).suffix.lower(), file_hash(Path(path))] for path in paths],
        "tokenizer": {str(path.relative_to(tokenizer_dir)): file_hash(path) for path in tokenizer_files},
        "options": options,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_configuration(folder: Path) -> list[Path]:
    """The files of a model folder that a tokenizer may read: anything small, no weights and no weight index."""
    suffixes = (".json", ".jinja", ".model", ".txt", ".tiktoken")
    if not folder.is_dir():
        return []
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")]
    return sorted(p for p in files if p.name.endswith(suffixes) and not p.name.endswith(".index.json"))


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_cache(folder: Path, dataset: TokenDataset) -> None:
    """Write under a name of this process's own, then rename: a folder of the right name is complete. Raises UserError,
    and leaves nothing, where the disk refuses."""
    temporary = folder.with_name(f".{folder.name}.{platform.node()}-{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had the same number
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
        with contextlib.suppress(OSError):  # nothing is there
            os.rename(folder, aside)
        with contextlib.suppress(OSError):
            # Put there since by another machine that shares this file system, which reads it now.
            if load_cached(aside, dataset.paths) is not None:
                os.rename(aside, folder)
        with contextlib.suppress(OSError):  # another machine was faster, with the same contents
            os.rename(temporary, folder)
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


def _fill(folder: Path, dataset: TokenDataset) -> None:
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
    """The data set of a cache folder, memory-mapped; None where it is missing, incomplete or damaged.

    paths: what its files are called now.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        for name in ARRAYS:
            if checksum(folder / f"{name}.npy") != meta["crc32"][name]:
                return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        rejects = [Reject(**reject) for reject in meta["rejects"]]
        stats = DataStats(**meta["stats"])
        kept = {name: meta[name] for name in ("fingerprint", "unused", "turn_ends")}
        return TokenDataset(**arrays, paths=paths, stats=stats, rejects=rejects, **kept)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, mode="r").data)


@contextlib.contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """One process of this machine at a time, for one cache folder.

    The lock lies in the system's temporary folder: a process that is killed while it waits (torchrun does that to the
    others when one rank fails) leaves nothing where the run writes. Everybody may write there: the lock has a folder of
    this user alone, no link is followed, and it is deleted again.
    """
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    path = own_temporary_folder() / f"{digest}.lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file closes, or the process dies
            if not is_of(lock, path):
                continue  # whoever held it has deleted it
            try:
                yield
            finally:
                path.unlink()
            return
        finally:
            os.close(lock)


def is_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def own_temporary_folder() -> Path:
    """A folder in the system's temporary one that nobody else may enter. Raises UserError where its name is taken."""
    folder = Path(tempfile.gettempdir()) / f"isoloss-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} is not a folder of yours alone: delete it, or set TMPDIR to another folder")
    return folder
