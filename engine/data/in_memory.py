"""Rows of a program's memory: kept in a file for a run, or made samples for a loop of one's own."""

import contextlib
import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.data.chat import tokenize_row
from isoloss.engine.data.chat_template import NOTHING
from isoloss.engine.data.files.values import MAX_DEPTH
from isoloss.engine.data.rows import Row, unread_rows
from isoloss.parallel.runtime.errors import UserError

GivenRows = Iterable[Mapping[str, Any]]


def keep_rows(rows: GivenRows, split: str, folder: Path) -> str:
    """Write rows to folder/DIGEST/SPLIT.jsonl, named by their content, and return its path.

    A run then reads, caches, fingerprints and resumes them as rows of any file, and row n is line n + 1 of it. Any
    number of processes may call at once. Enters no collective.
    Raises UserError for what is no row, and where the disk refuses.
    """
    digest = hashlib.sha256()
    unfinished = folder / f".{uuid.uuid4()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            for row in checked(rows, split):
                line = json.dumps(row).encode() + b"\n"
                digest.update(line)
                file.write(line)
        path = folder / digest.hexdigest()[:16] / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(
            f"the rows of {split} could not be written into {folder} ({error}): make room there, or set data.cache_dir"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return str(path)


def to_samples(rows: GivenRows, tokenizer: Any, template_kwargs: Mapping[str, Any] = NOTHING) -> list[Sample]:
    """Return a sample of each row, tokenized as the rows of data.train are in supervised fine-tuning.

    tokenizer: tokenizer from `load_tokenizer`.
    template_kwargs: variables for the chat template, like data.template_kwargs.
    Raises UserError that names the row, such as rows[3].
    """
    samples = []
    for index, values in enumerate(checked(rows, "rows")):
        place = f"rows[{index}]"
        row = Row(place, {name: value for name, value in values.items() if value is not None})
        tokens_T, mask_T = tokenize_row(row, tokenizer, template_kwargs)
        samples.append(Sample(torch.tensor(tokens_T), torch.tensor(mask_T), group=index, id=place))
    return samples


def load_rows(paths: str | Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of one file or several, in their order, without columns that are null.

    Raises UserError for a file that cannot be read, and for a row that cannot be parsed.
    """
    paths = [paths] if isinstance(paths, str) else paths
    return [unread.read().values for unread in unread_rows(paths, "load_rows")]


def checked(rows: GivenRows, name: str) -> Iterator[dict[str, Any]]:
    """Yield each row with plain values, which JSON gives back as they are. name: name of the rows in messages."""
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise UserError(f"{name} is of type {type(rows).__name__}, not rows: give a list of {{column: value}}")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}[{index}] is of type {type(row).__name__}, not a row: give {{column: value}}")
        yield plain(row, f"{name}[{index}]")


def plain(value: Any, place: str, depth: int = 0) -> Any:
    """Return a value with dicts for mappings and lists for tuples. Raises UserError for what JSON cannot hold."""
    if depth > MAX_DEPTH:
        raise UserError(f"{place[:60]}... is nested more than {MAX_DEPTH} deep: flatten it")
    if isinstance(value, Mapping):
        if others := [key for key in value if not isinstance(key, str)]:
            raise UserError(f"{place} has the key {others[0]!r}, which is not text: write it as text")
        return {key: plain(inner, f"{place}[{key!r}]", depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, f"{place}[{number}]", depth + 1) for number, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{place} is {value}, which rows cannot keep: leave it out, or give a finite number")
    if value is not None and not isinstance(value, str | int | float):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise UserError(f"{place} is a {kind}, which rows cannot keep: give text, numbers, lists and mappings")
    return value
