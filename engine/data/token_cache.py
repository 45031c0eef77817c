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
from isoloss.engine.data.token_dataset import ARRAYS, ROWS, DataStats, TokenDataset
from isoloss.engine.data.token_shards import Shard
from isoloss.engine.data.tokenizing import Tokenized
from isoloss.parallel.runtime.errors import UserError

FORMAT = 8  # version of the folder's files and of the tokenization; folders of other versions are not read


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


def write_cache(folder: Path, tokenized: Tokenized) -> TokenDataset:
    """Write the cache folder under a name of this process, then rename it: a folder under its final name is complete.

    Return the data set, which stays usable if another machine replaces the folder.
    Raises OSError, and leaves no file, if the disk refuses.
    """
    paths = tokenized.job.paths
    temporary = folder.with_name(f".{folder.name}.{platform.node()}-{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process of the same number
    try:
        _fill(temporary, tokenized)
        written = load_cached(temporary, paths)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    assert written is not None, f"{temporary} cannot be read back"
    if load_cached(folder, paths) is None:
        aside = temporary.with_suffix(".damaged")
        with contextlib.suppress(OSError):  # there is no damaged folder
            os.rename(folder, aside)
        with contextlib.suppress(OSError):
            # A machine that shares this file system has written it since, and may be reading it.
            if load_cached(aside, paths) is not None:
                os.rename(aside, folder)
        with contextlib.suppress(OSError):  # another machine was faster and wrote the same contents
            os.rename(temporary, folder)
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    return load_cached(folder, paths) or written


def _fill(folder: Path, tokenized: Tokenized) -> None:
    """Write the arrays and meta.json, with the arrays' checksums, into a new folder. Holds one shard in memory."""
    folder.mkdir(parents=True)
    shards, stats = tokenized.shards, tokenized.stats
    arrays = {
        "tokens": ((stats.tokens,), (shard.bytes_of("tokens") for shard in shards)),
        "mask": ((stats.tokens,), (shard.bytes_of("mask") for shard in shards)),
        "offsets": ((stats.rows + 1,), _offsets(shards)),
        "origins": ((stats.rows, 2), (shard.rows()[:, 1:].tobytes() for shard in shards)),
    }
    checksums, fingerprint = {}, hashlib.sha256()
    for name, (shape, blocks) in arrays.items():
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(ARRAYS[name])), "fortran_order": False, "shape": shape}
        with open(folder / f"{name}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:
                file.write(block)
                if name in ROWS:
                    fingerprint.update(block)
        checksums[name] = checksum(folder / f"{name}.npy")
    meta = {"format": FORMAT, "stats": asdict(stats), "fingerprint": fingerprint.hexdigest()[:16], "crc32": checksums}
    meta["rejects"] = [asdict(reject) for reject in tokenized.rejects]
    meta |= {"unused": tokenized.unused, "turn_ends": tokenized.turn_ends}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _offsets(shards: Sequence[Shard]) -> Iterator[bytes]:
    yield np.zeros(1, "<i8").tobytes()
    end = 0
    for shard in shards:
        ends = end + np.cumsum(shard.rows()[:, 0], dtype="<i8")
        yield ends.tobytes()
        end = int(ends[-1]) if len(ends) else end


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
