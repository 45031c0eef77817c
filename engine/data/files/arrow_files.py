"""Read Parquet and Arrow files: batches of columns, of which a row is converted when it is parsed."""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from isoloss.engine.data.files.opening import Growth
from isoloss.engine.data.files.values import Parse, one_line, without_nulls
from isoloss.parallel.runtime.errors import UserError

# Columns whose objects have different fields within a file.
NESTED = ("messages", "prompt", "completion", "tools", "conversations", "conversation", "functions")
BATCH_ROWS = 64  # rows of a Parquet file in memory at a time
ARROW_FILE = b"ARROW1"  # what an Arrow file begins with; a stream begins with the length of its schema


def parquet_rows(path: str, key: str) -> Iterator[tuple[int, Parse]]:
    """Yield (row number, parse) of every row. Raises ValueError or OSError for a damaged file, UserError for one whose
    rows hold too much."""
    import pyarrow.parquet as pq

    with arrow_errors(), pq.ParquetFile(path) as file:
        yield from rows_of(file.iter_batches(batch_size=BATCH_ROWS), Growth(path, key))


def arrow_rows(path: str, key: str) -> Iterator[tuple[int, Parse]]:
    """Yield (row number, parse) of every row of an Arrow file or stream, as `parquet_rows` does."""
    import pyarrow as pa

    with arrow_errors(), pa.memory_map(path) as source:
        yield from rows_of(map(checked, arrow_batches(source)), Growth(path, key))


def arrow_batches(source: Any) -> Iterator[Any]:
    import pyarrow as pa

    kind = source.read(len(ARROW_FILE))
    source.seek(0)
    if kind != ARROW_FILE:
        yield from pa.ipc.open_stream(source)
        return
    with pa.ipc.open_file(source) as file:
        for index in range(file.num_record_batches):
            yield file.get_batch(index)


def checked(batch: Any) -> Any:
    """Return a batch of a file whose offsets point into its own memory. Raises pyarrow.ArrowException."""
    batch.validate(full=True)  # Arrow trusts a file: a wrong offset would end the process, or read foreign memory
    return batch


def rows_of(batches: Iterable[Any], growth: Growth) -> Iterator[tuple[int, Parse]]:
    """Yield (row number, parse) of every row of some record batches. Raises UserError if they hold too much."""
    import pyarrow as pa

    number = 0
    for batch in batches:
        columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
        growth.add(sum(column.nbytes for column in columns), f"its rows up to {number + batch.num_rows:,}")
        for index in range(batch.num_rows):
            number += 1
            yield number, partial(column_values, batch, index)


def count_parquet(path: str) -> int:
    import pyarrow.parquet as pq

    return pq.read_metadata(path).num_rows


@contextlib.contextmanager
def arrow_errors() -> Iterator[None]:
    """Raise ValueError for an error of Arrow in the block."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise ValueError(one_line(error)) from None


def column_values(batch: Any, index: int, place: str) -> dict[str, Any]:
    """Convert row `index` of a record batch into plain values. Raises UserError."""
    values = {}
    for name, column in zip(batch.schema.names, batch.columns):
        try:
            value = column[index].as_py()
        except (ValueError, OverflowError, RecursionError) as error:  # text that is not UTF-8, a date out of range
            value = as_text(column[index])
            if value is None:
                raise UserError(
                    f"{place}: `{name}` cannot be read ({one_line(error)}): write the row anew, or take the column out"
                ) from None
        values[name] = without_nulls(value) if name in NESTED else value
    return values


def as_text(scalar: Any) -> str | None:
    """Return a scalar that Python has no type for, such as a time in nanoseconds, as text; None if Arrow cannot."""
    import pyarrow as pa

    for kind in (pa.string(), pa.int64()):
        try:
            return str(scalar.cast(kind).as_py())
        except (pa.ArrowException, ValueError):
            continue
    return None
