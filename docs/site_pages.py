"""A hook of mkdocs.yml: README.md and its neighbours are pages of the site, and so is every file that a page links to.

A link works in three places: on GitHub, in a checkout, and on the site. So pages link to files as they lie in the
repository, and this hook turns a link that leaves docs/ into one to the page that shows that file.
"""

import os.path
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
CODE_IN_ROW = re.compile(r"`[^`]*`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md and its neighbours, and a page for each file outside of docs/ that a page links to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for file in list(files.documentation_pages()):
        for target in linked(file.content_string, file.src_uri):
            page = page_of(target)
            new = page.startswith("source/") and files.get_file_from_path(page) is None
            if new and (ROOT / target).is_file():  # MkDocs tells of a link that leads nowhere
                files.append(File.generated(config, page, content=source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    folder = PurePosixPath(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        return os.path.relpath(page_of(in_repository(match[1], page.file.src_uri)), folder)

    if page.file.src_uri.startswith("source/"):
        return markdown
    parts = outside_of_fences(markdown)
    return "".join(part if part.startswith("```") else unescaped(LINK.sub(link, part)) for part in parts)


def linked(markdown: str, page: str) -> list[str]:
    """The files that a page links to, by their path in the repository."""
    text = "".join(part for part in outside_of_fences(markdown) if not part.startswith("```"))
    return [in_repository(match[1], page) for match in LINK.finditer(text)]


def in_repository(link: str, page: str) -> str:
    """The path in the repository of what `link` names on a page of the site."""
    folder = "" if page in PAGES.values() else f"docs/{PurePosixPath(page).parent}"
    return os.path.normpath(os.path.join(folder, link))


def page_of(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def source_page(path: str) -> str:
    text = (ROOT / path).read_text()
    return f"# `{path}`\n\n~~~~{{.{Path(path).suffix[1:] or 'text'}}}\n{text}\n~~~~\n"


def outside_of_fences(markdown: str) -> list[str]:
    """The text, cut into parts that are a fenced block and parts that are none."""
    return re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)


def unescaped(markdown: str) -> str:
    r"""In a table GitHub wants `a \| b` in code; Python-Markdown takes `a | b` there, and would show the backslash."""
    lines = [
        CODE_IN_ROW.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    ]
    return "\n".join(lines)
