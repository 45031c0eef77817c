"""Find the files that data.train and data.eval name: files, folders, globs, saved data sets, names of the hub."""

import glob
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from isoloss.engine.data.files.kinds import check_paths, kind_of, kinds
from isoloss.engine.data.files.values import listed, one_line, parse_json
from isoloss.parallel.runtime.errors import UserError

HUB = re.compile(r"(?:hf://)?(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+)(?::(?P<of>[\w.-]+))?(?::(?P<split>[\w.-]+))?")
# Files of a folder that hold no rows.
NO_ROWS = re.compile(r"\..*|readme.*|licen[cs]e.*|.*\.md|dataset_infos?\.json", re.IGNORECASE)
SPLITS = {"train": "train", "test": "test", **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "eval")}
SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(SPLITS)})(?=[-_.]|\d|$)", re.IGNORECASE)
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"  # what `datasets.save_to_disk` writes


def files_of(names: Sequence[str], key: str) -> tuple[str, ...]:
    """Return the files that data.train or data.eval names, those of a folder or a glob in sorted order.

    key: such as "data.train". Raises UserError for a name without a file that can be read.
    """
    return files_and_sources(names, key)[0]


def files_and_sources(names: Sequence[str], key: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return what `files_of` returns, and for each file the index in `names` of the name that it is of.

    Both from one look: a second one might find a file that was written meanwhile.
    """
    found = [(path, source) for source, name in enumerate(names) for path in _files(name, key)]
    paths = tuple(path for path, _ in found)
    check_paths(paths, key)
    return paths, tuple(source for _, source in found)


def named_files(names: Sequence[str], key: str) -> tuple[str, ...]:
    """Return what `files_of` returns, without a look at the files that are named one by one."""
    return tuple(path for name in names for path in _files(name, key))


def _files(name: str, key: str) -> Iterable[str]:
    head, _, split = name.rpartition(":")
    if Path(name).is_file():
        return [name]
    if Path(name).is_dir():
        return folder_files(Path(name), None, key)
    if any(letter in name for letter in "*?["):
        if found := sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file()):
            return found
        raise UserError(f"{key}: no file matches {name}: correct the pattern")
    if head and Path(head).is_dir():
        return folder_files(Path(head), split, key)
    hub = HUB.fullmatch(name)
    if hub and (name.startswith("hf://") or not (kind_of(name) or Path(name).parent.is_dir())):
        of, split = (hub["of"], hub["split"]) if hub["split"] else (None, hub["of"])
        return hub_files(hub["name"], of, split, key)
    return [name]


def folder_files(folder: Path, split: str | None, key: str) -> list[str]:
    """Return the files of a folder. split: that of a saved DatasetDict. Raises UserError."""
    if (folder / SAVED_SPLITS).is_file():
        splits = _saved(folder / SAVED_SPLITS, "splits", key)
        if split is None and len(splits) == 1:
            (split,) = splits
        if split not in splits:
            wrong = "has several splits" if split is None else f"has no split {split!r}"
            raise UserError(f"{key}: {folder} {wrong}: give {' or '.join(f'{folder}:{name}' for name in splits)}")
        return folder_files(folder / split, None, key)
    if split is not None:
        raise UserError(f"{key}: {folder} has no {SAVED_SPLITS}, so no split {split!r}: give the files of the split")
    if (folder / SAVED).is_file():
        names = _saved(folder / SAVED, "_data_files", key)
        return [str(folder / name) for name in names]
    return plain_files(folder, key)


def _saved(path: Path, field: str, key: str) -> list[str]:
    """Return the names in a file that `datasets.save_to_disk` wrote. Raises UserError."""
    try:
        entries = parse_json(path.read_text(encoding="utf-8"))[field]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: {path} cannot be read ({one_line(error)}): save the data set anew") from None
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise UserError(f"{key}: {path} names {wrong[0]!r}, which is no name in its folder: save the data set anew")
    return names


def plain_files(folder: Path, key: str) -> list[str]:
    """Return the files of a folder in sorted order. Raises UserError unless all have rows, of one kind and split."""
    entries = sorted(entry for entry in folder.iterdir() if not NO_ROWS.fullmatch(entry.name))
    if others := [entry.name + "/" * entry.is_dir() for entry in entries if entry.is_dir() or not kind_of(entry.name)]:
        raise UserError(
            f"{key}: the folder {folder} holds {listed(others, 80)}, which cannot be read: {_instead(folder, entries)}"
        )
    if not entries:
        raise UserError(f"{key}: {folder} is a folder without files of rows: give {kinds()} files")
    found = {kind.name for entry in entries if (kind := kind_of(entry.name))}
    splits = {SPLITS[name.lower()] for entry in entries for name in SPLIT.findall(entry.name)}
    for several, what in ((found, "files of several kinds"), (splits, "files of several splits")):
        if len(several) > 1:
            raise UserError(
                f"{key}: the folder {folder} holds {what} ({listed(sorted(several))}): {_instead(folder, entries)}"
            )
    return [str(entry) for entry in entries]


def _instead(folder: Path, entries: Sequence[Path]) -> str:
    """Return what to give in place of a folder: an example of a glob."""
    files = [entry for entry in entries if kind_of(entry.name)]
    split = next((found[1] for entry in files if (found := SPLIT.search(entry.name))), "")
    suffix = files[0].suffix if files else ".jsonl"
    return f"name those that you mean, as in '{folder / f'{split}*{suffix}'}'"


@cache
def hub_files(name: str, configuration: str | None, split: str | None, key: str) -> tuple[str, ...]:
    """Return the Arrow files that the `datasets` library makes of a split of the hub's data set. Raises UserError."""
    folder = name.rpartition("/")[2]
    instead = f"hf download {name} --repo-type dataset --local-dir {folder}, then name its files in {key}"
    try:
        import datasets  # pyright: ignore[reportMissingImports] -- not a dependency
    except ImportError:
        raise UserError(
            f"{key}: {name} is no file, and to read it from the Hugging Face hub needs the `datasets` library: pip "
            f"install 'datasets>=4'; or {instead}"
        ) from None
    if split is None:
        raise UserError(
            f"{key}: name the split of {name}: {name}:SPLIT or {name}:CONFIGURATION:SPLIT, as in {name}:train"
        )
    try:
        found: Any = datasets.load_dataset(name, configuration, split=split)
        files = tuple(file["filename"] for file in found.cache_files)
    except Exception as error:  # of the library, the network, the hub
        raise UserError(f"{key}: the hub does not give {name} ({one_line(error)}): correct it; or {instead}") from None
    if not files:
        raise UserError(f"{key}: {name} has no files of rows that are kept: {instead}")
    return files
