"""Read JSON Lines and JSON arrays, a row at a time."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from isoloss.engine.data.files.opening import open_bytes
from isoloss.engine.data.files.values import Parse, parse_json, shown
from isoloss.parallel.runtime.errors import UserError

MARK = b"\xef\xbb\xbf"  # of the order of bytes, which Windows writes
# A text, of which the last quote is missing where no more of the file is read yet; else a bracket.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[][{}]', re.DOTALL)
CHUNK = 1 << 20  # bytes


def json_lines(path: str, key: str) -> Iterator[tuple[int, Parse]]:
    """Yield (line number, parse) of every line that is not blank."""
    with open_bytes(path, key) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, partial(json_values, line)


def json_rows(path: str, key: str) -> Iterator[tuple[int, Parse]]:
    """Yield (row number, parse) of every row of a JSON array, or of JSON Lines if the file does not begin with "[".

    Raises ValueError for an array that is damaged.
    """
    with open_bytes(path, key) as file:
        is_array = file.peek(CHUNK).removeprefix(MARK).lstrip()[:1] == b"["
        rows = array_elements(file) if is_array else (line for line in file if line.strip())
        for number, row in enumerate(rows, 1):
            yield number, partial(json_values, row)


def array_elements(file: BinaryIO) -> Iterator[bytes]:
    """Yield the text of every object of a JSON array. Raises ValueError for an array of anything else.

    An object is found by its brackets, so that one that is no JSON does not end the reading of the others.
    """
    text, taken, position, start, depth, count = b"", 0, 0, 0, 0, 0
    while chunk := file.read(max(CHUNK, len(text))):
        # The text from the end of the last object on, so that memory holds one object and a chunk.
        text, position, start, taken = text[taken:] + chunk, position - taken, start - taken, 0
        for token in TOKEN.finditer(text, position):
            if token[1] == b"":
                break  # within a text
            position = token.end()
            if token[0] in (b"[", b"{"):
                if depth < 2:
                    check_gap(text[taken : token.start()], b"" if count == 0 else b",")
                    start, taken = token.start(), token.end() if depth == 0 else token.start()
                depth += 1
            elif token[0] in (b"]", b"}"):
                depth -= 1
                if depth == 1:
                    count, taken = count + 1, position
                    yield text[start:position]
                elif depth == 0:
                    check_gap(text[taken : token.start()], b"")
                    check_gap(text[position:], b"")
                    while chunk := file.read(CHUNK):
                        check_gap(chunk, b"")
                    return
    raise ValueError("the array does not end: the file is not complete")


def check_gap(gap: bytes, expected: bytes) -> None:
    """Raise ValueError unless `expected` and white space stand between two objects."""
    found = gap.removeprefix(MARK).strip()
    if found != expected:
        what = "a comma" if expected else "nothing"
        raise ValueError(f"{what} is expected between its objects, not {shown(found.decode(errors='replace'))}")


def json_values(line: bytes, place: str) -> dict[str, Any]:
    """Parse a line of JSON Lines into a row's values. Raises UserError."""
    try:
        text = line.rstrip(b"\r\n").decode("utf-8-sig")  # concatenated files have byte-order marks in their middle
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 at byte {error.start} of the line: save it as UTF-8") from None
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"{place}: {error}: write one JSON object on each line, or drop the row") from None
    if not isinstance(values, dict):
        raise UserError(f"{place}: a row must be a JSON object, not {shown(values)}")
    return values
