"""Files that would run something, if anybody let them: what runs makes a file, the mark."""

import io
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isoloss.models.weights import manifest


class Payload:
    """Unpickled, it makes the mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (code(self.mark),)


def code(mark: Path) -> str:
    """The source of a program that makes the mark."""
    return f"open({str(mark)!r}, 'w').close()"


def saved(value: object, **options: Any) -> bytes:
    """What torch.save makes of it."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def archive(pickled: bytes) -> bytes:
    """As of torch.save, around any pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as records:
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            records.writestr(f"archive/{name}", data)
    return file.getvalue()


def by_name(module: str, name: str, argument: str) -> bytes:
    """A pickle of protocol 4 that calls module.name(argument)."""
    strings = b"".join(b"\x8c" + bytes([len(text.encode())]) + text.encode() for text in (module, name))
    return b"\x80\x04" + strings + b"\x93" + pickle.dumps(argument, 4)[2:-1] + b"\x85R."


def sign(folder: Path) -> None:
    """Have the manifest of a checkpoint say that all is as it was written: whoever plants files can do that."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != manifest.NAME)
    records = {
        path.relative_to(folder).as_posix(): manifest.FileRecord(path.stat().st_size, manifest.crc32(path))
        for path in files
    }
    path = folder / manifest.NAME
    path.write_text(replace(manifest.read(folder), files=records).to_json())
