"""Read comma- and tab-separated values: a line of names, then a row of text a record."""

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from isoloss.engine.data.files.opening import open_bytes
from isoloss.engine.data.files.values import Parse, listed, parse_json
from isoloss.parallel.runtime.errors import UserError

# Columns that hold a list or an object in every other kind of file; here their cells are JSON text.
NESTED = ("messages", "conversations", "conversation", "history", "tools", "functions", "reward_model", "extra_info")


def separated_rows(path: str, key: str, delimiter: str) -> Iterator[tuple[int, Parse]]:
    """Yield (row number, parse) of every record after the names. Raises ValueError or csv.Error for a damaged file."""
    csv.field_size_limit(sys.maxsize)  # by default a text of more than 128 KiB is an error
    with open_bytes(path, key) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        records = csv.reader(text, delimiter=delimiter, strict=True)
        names = next(records, [])
        if wrong := [name for name, count in Counter(names).items() if count > 1 or not name.strip()]:
            raise ValueError(f"the column {wrong[0]!r} of its first line has no name, or one that stands twice")
        for number, cells in enumerate(filter(None, records), 1):
            yield number, partial(cell_values, names, cells)


def cell_values(names: Sequence[str], cells: Sequence[str], place: str) -> dict[str, Any]:
    """Return the values of a record, text but for NESTED columns. Raises UserError."""
    if len(cells) != len(names):
        raise UserError(
            f"{place}: {len(cells)} cells for the {len(names)} columns {listed(names)}: put cells with a separator or "
            "a quote into quotes, or drop the row"
        )
    values: dict[str, Any] = dict(zip(names, cells))
    for name in NESTED:
        if cell := values.get(name, "").strip():
            try:
                values[name] = parse_json(cell)
            except ValueError as error:
                raise UserError(f"{place}: `{name}` is {error}: write it as JSON text") from None
    return values
