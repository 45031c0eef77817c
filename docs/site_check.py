"""A hook of mkdocs.yml: warn of a page that loads anything from elsewhere, which `mkdocs build --strict` refuses.

The site is read from disk, also on machines without a network.
"""

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ELSEWHERE = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:|//)", re.I)  # a scheme, or a host
LOADED_LINKS = {"stylesheet", "preload", "prefetch", "preconnect", "modulepreload", "icon", "manifest"}  # values of rel
IN_CSS = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}  # attribute by tag


class Loads(HTMLParser):
    """Collects the addresses that a browser loads for a page. A link to another page is none."""

    def __init__(self):
        super().__init__()
        self.addresses: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._style = tag == "style"
        if tag == "link" and not LOADED_LINKS & set(values.get("rel", "").split()):
            return
        if address := values.get(LOADED.get(tag, "")):
            self.addresses.append(address)
        self.addresses += in_css(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._style:
            self.addresses += in_css(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def in_css(text: str) -> list[str]:
    return [first or second for first, second in IN_CSS.findall(text)]


def from_elsewhere(file: Path) -> list[str]:
    """Return the addresses with a scheme or a host that a page or a style sheet loads; data: is part of the file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".css":
        addresses = in_css(text)
    else:
        page = Loads()
        page.feed(text)
        addresses = page.addresses
    return [a for a in addresses if ELSEWHERE.match(a) and not a.strip().startswith("data:")]


def on_post_build(config: "MkDocsConfig") -> None:
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css"):
            for address in from_elsewhere(file):
                log.warning(f"{file} loads {address}: the site must load nothing from elsewhere")


log = logging.getLogger("mkdocs.hooks.site_check")
