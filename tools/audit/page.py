"""Write an audit as one page of HTML, which loads nothing and runs no script but its own."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from isoloss.tools.audit.audit import Audit
from isoloss.tools.audit.pieces import LEGEND, Piece
from isoloss.tools.audit.report import Entry, sections
from isoloss.tools.audit.shown import ShownRow, for_page, shown_rows

ROWS = 300  # of a split
STYLE, SCRIPT = (Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js"))


def page(audit: Audit, title: str) -> str:
    """Return the page. title: recipe and preset."""
    rows = [
        row
        for number, (split, remarks) in enumerate(zip(audit.splits, audit.remarks))
        for row in shown_rows(audit, number, for_page(split, remarks, ROWS))
    ]
    tables = "".join(section(part, entries) for part, entries in sections(audit))
    # Texts of rows are a stranger's. They are escaped, and if that failed the browser would run no script but this one.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    kinds = "".join(f'<span class="{kind}">{escape(words)}</span> ' for kind, words in LEGEND.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>isoloss audit: {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>What the loss will see: {escape(title)}</h1>\n{tables}"
        f'<h2>Rows</h2>\n<p class="legend">{kinds}<span class="special">special token</span></p>\n{FILTER}'
        f'<ol id="rows">\n{"".join(map(row_item, rows))}</ol>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


FILTER = (
    '<form id="filter"><input type="search" id="words" placeholder="text, file:line or remark" aria-label="Search">'
    '<label><input type="checkbox" id="odd"> with a remark</label>'
    '<output id="count"></output></form>\n'
)


def section(title: str, entries: Sequence[Entry]) -> str:
    """Return a table of figures under a title."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(visible(text))}</td></tr>\n" for name, text in entries)
    return f"<h2>{escape(visible(title))}</h2>\n<table>\n{''.join(lines)}</table>\n"


def row_item(row: ShownRow) -> str:
    """Return a row: what is odd about it, and its text with every piece marked."""
    why = f'<span class="why">{escape(visible("; ".join(row.why)))}</span>' if row.why else ""
    targets = f", {row.targets:,} trained" if row.answer is None else ""
    answer = f'<p class="answer">answer: {escape(visible(row.answer))}</p>' if row.answer is not None else ""
    return (
        f"<li{' class=odd' if row.why else ''}><p><b>{escape(visible(f'{row.key} {row.place}'))}</b> "
        f"{row.length:,} tokens{targets} {why}</p><pre>{''.join(map(span, row.pieces))}</pre>{answer}</li>\n"
    )


def span(piece: Piece) -> str:
    """Return a piece as a marked element."""
    special = " special" if piece.special else ""
    return f'<span class="{piece.kind}{special}">{escape(visible(piece.text))}</span>'


def visible(text: str) -> str:
    """Return a text in which control characters and marks of direction are written as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
