"""`isoloss.json`, the manifest of a checkpoint folder: what it holds, and size and checksum of every file in it.

It is written last, so a folder that has one is whole. The checksum is CRC-32 (that of zip and gzip): it finds every
flipped bit, and misses other damage once in four billion times, at several times the speed of sha256, which would cost
more of a processor than everything else that is done to the bytes of a checkpoint.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from isoloss.models.weights.checkpoint_names import Style
from isoloss.parallel.runtime.console import Progress
from isoloss.parallel.runtime.errors import UserError

NAME = "isoloss.json"
VERSION = 1
KINDS = ("converted", "trained", "adapter")
_BLOCK_BYTES = 4 << 20
MAX_JSON_BYTES = (
    256 << 20
)  # parsed, it takes some ten times as much memory; the largest index that is published has 10 MB
# How a file begins that stands for one which Git has left on its server.
_GIT_LFS = b"version https://git-lfs.github.com/spec/"
IS_A_POINTER = "is a pointer of Git LFS, not the file itself; run git lfs pull in its folder"


class DamagedError(UserError):
    """A file of a checkpoint is missing, cannot be read, or does not hold what was written."""


@dataclass(frozen=True)
class FileRecord:
    """bytes: size of a file. crc32: its checksum, eight hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint's files.
    kind: "converted" from a Hugging Face folder, "trained", or "adapter", of which it holds the factors alone.
    family: family of the architecture, such as "llama".
    vocab_size: the true one, without padding rows.
    key_style: naming of the weights (checkpoint_names).
    dtypes: types of the weights, sorted, such as ("bfloat16",).
    num_tensors: number of tensors that the checkpoint's own metadata names.
    files: every other file of the folder by its relative name, with "/" on every system.
    adapter: keys of the adapter and a fingerprint of the weights that it is for; None for a whole model.
    """

    kind: str
    family: str
    vocab_size: int
    key_style: Style
    dtypes: tuple[str, ...]
    num_tensors: int
    files: Mapping[str, FileRecord]
    adapter: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        fields = {
            "format": VERSION, "kind": self.kind, "family": self.family, "vocab_size": self.vocab_size,
            "key_style": self.key_style.value, "dtypes": list(self.dtypes), "num_tensors": self.num_tensors,
            "files": files_to_json(self.files),
        }  # fmt: skip
        if self.adapter is not None:
            fields["adapter"] = dict(self.adapter)
        return json.dumps({**fields, "crc32": _crc32_of_fields(fields)}, indent=2) + "\n"


def read(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises DamagedError where it is missing or damaged, UserError where it is
    of a later format."""
    path = Path(folder) / NAME
    mend = "the checkpoint is not complete, or isoloss did not write it; convert or save it again"
    mend = mend if path.parent.is_dir() else f"there is no folder {folder}: correct the path"
    fields = read_json(path, mend, DamagedError)
    if fields.get("format") != VERSION:
        raise UserError(f"{path}: format={fields.get('format')!r} is not {VERSION}; use the isoloss that wrote it")
    own = fields.pop("crc32", None)  # earlier manifests have none
    if own is not None and own != _crc32_of_fields(fields):
        raise DamagedError(f"{path} is damaged (its CRC-32 differs); convert or save the checkpoint again")
    try:
        manifest = Manifest(
            kind=fields["kind"],
            family=str(fields["family"]),
            vocab_size=int(fields["vocab_size"]),
            key_style=Style(fields["key_style"]),
            dtypes=tuple(map(str, fields["dtypes"])),
            num_tensors=int(fields["num_tensors"]),
            files=files_from_json(fields["files"]),
            adapter=dict(fields["adapter"]) if "adapter" in fields else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged ({error!r}); convert or save the checkpoint again") from None
    if outside := [name for name in manifest.files if not _is_within(name)]:
        raise UserError(f"{path} names {outside[0]!r}, which is no file of the checkpoint; save or copy it anew")
    if manifest.kind not in KINDS:
        raise UserError(f"{path}: kind={manifest.kind!r} is not one of {', '.join(KINDS)}; convert or save it again")
    return manifest


def check_sizes(folder: str | Path, manifest: Manifest) -> None:
    """Check that every file exists at its size; read none of them. Raises DamagedError naming the first that fails."""
    folder = Path(folder)
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{folder} lacks {name}, which its {NAME} names; copy or convert the checkpoint again")
        size = path.stat().st_size
        if size != record.bytes:
            raise DamagedError(
                f"{path} has {size} bytes instead of {record.bytes}; copy or convert the checkpoint again"
            )


def check_checksums(
    folder: str | Path, manifest: Manifest, names: Iterable[str] | None = None, *, shown: bool = False
) -> None:
    """Check that these files (default: all) hold the bytes that were written; read them whole.

    shown: whether to show progress.
    Raises DamagedError naming the first that does not.
    """
    folder = Path(folder)
    check_sizes(folder, manifest)
    names = list(manifest.files if names is None else names)
    total = sum(manifest.files[name].bytes for name in names)
    with Progress("checking", f"of {folder}", lambda: total, shown, nbytes=True) as progress:
        _check_each(folder, manifest, names, progress.advance)


def _check_each(folder: Path, manifest: Manifest, names: Iterable[str], report: Callable[[int], None]) -> None:
    for name in names:
        try:
            found = crc32(folder / name, report)
        except OSError as error:
            raise DamagedError(
                f"{folder / name} cannot be read ({error.strerror}); copy the checkpoint again"
            ) from None
        if found != manifest.files[name].crc32:
            raise DamagedError(f"{folder / name} is damaged (its CRC-32 differs); copy or convert the checkpoint again")


def crc32(path: Path, report: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the checksum of a file. report: called with the number of bytes read since."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            report(len(block))
    return f"{checksum:08x}"


def _is_within(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _crc32_of_fields(fields: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's other fields, whatever the order and the spaces in its file."""
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def sync(path: str | Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, mend: str, problem: type[UserError] = UserError) -> dict[str, Any]:
    """A JSON object from a file. mend: ends the `problem` that a missing or damaged one raises."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise problem(f"{path} has {size:,} bytes, more than the {MAX_JSON_BYTES:,} that are read; {mend}")
        fields = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise problem(f"{path} is missing; {mend}") from None
    except OSError as error:
        raise problem(f"{path} cannot be read ({error.strerror}); {mend}") from None
    except (ValueError, RecursionError) as error:
        if is_pointer(path):
            raise problem(f"{path} {IS_A_POINTER}") from None
        raise problem(f"{path} is not valid JSON ({error}); {mend}") from None
    if not isinstance(fields, dict):
        raise problem(f"{path} must hold a JSON object, not {type(fields).__name__}; {mend}")
    return fields


def is_pointer(path: Path) -> bool:
    """Return whether a file is a pointer of Git LFS."""
    with path.open("rb") as file:
        return file.read(len(_GIT_LFS)) == _GIT_LFS


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where a key stands twice: readers differ in which one they take."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {name[:40]!r} stands twice in an object")
    return fields


def files_to_json(files: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    return {name: asdict(record) for name, record in sorted(files.items())}


def files_from_json(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, FileRecord]:
    """The reverse of `files_to_json`. Raises KeyError, TypeError, ValueError or AttributeError where it is not one."""
    return {name: FileRecord(int(entry["bytes"]), str(entry["crc32"])) for name, entry in fields.items()}
