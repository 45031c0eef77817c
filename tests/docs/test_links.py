"""Every link, anchor and path on a page leads somewhere, in a checkout as on the site that `make docs` builds."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
AROUND = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # pages of the site that are not in docs/
PAGES = [*(ROOT / name for name in AROUND), *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "engine|models|parallel|recipes|tools|tests|benchmarks|docs"
CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
FENCE = re.compile(r"^```.*?^```$\n?", re.M | re.S)
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+|\w+/test_\w+\.py)`")
WIDEST_ROW = 140

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def headings(page: Path) -> list[str]:
    return HEADING.findall(FENCE.sub("", page.read_text()))


def on_github(heading: str) -> str:
    """The anchor of a heading there."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_site(heading: str) -> str:
    """The anchor that Python-Markdown makes."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pages
def test_links_lead_to_files_and_headings(page):
    def leads_somewhere(link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or not target.is_relative_to(ROOT):
            return False
        return not anchor or anchor in map(on_github, headings(target))

    links = [link for link in LINK.findall(CODE.sub("", page.read_text())) if not link.startswith("https://")]
    assert [link for link in links if not leads_somewhere(link)] == []


@pages
def test_an_anchor_is_the_same_on_github_and_on_the_site(page):
    found = headings(page)
    assert [on_github(heading) for heading in found] == [on_site(heading) for heading in found]
    linkable = [heading for heading in found if page.name != "CHANGELOG.md"]
    assert len(set(linkable)) == len(linkable), "two headings with one anchor"


@pages
def test_paths_exist(page):
    """Of the repository, or of tests/. NAME stands for any name. The changelog tells of files that were."""
    found = [path for path in PATH.findall(FENCE.sub("", page.read_text())) if "NAME" not in path]
    missing = [path for path in found if not (ROOT / path).exists() and not (ROOT / "tests" / path).exists()]
    assert page.name == "CHANGELOG.md" or missing == []


@pages
def test_a_list_has_an_empty_line_before_it(page):
    """Or the site shows it as a part of the paragraph."""
    text = re.sub(r"^<!--.*-->\n", "", FENCE.sub("\n", page.read_text()), flags=re.M)
    assert re.findall(r"^(?![-\d|#]| {2})(\S.*)\n(?:- |1\. )", text, re.M) == []


@pages
def test_rows_of_tables_can_be_read_in_an_editor(page):
    """But for a page that is generated, and edited nowhere."""
    assert (
        page.name == "keys.md"
        or [line for line in page.read_text().splitlines() if line.startswith("|") and len(line) > WIDEST_ROW] == []
    )


def test_the_site_shows_every_page_once():
    def paths(part) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [path for each in (part.values() if isinstance(part, dict) else part) for path in paths(each)]

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    ours = [page.name for page in PAGES if page.name not in AROUND]
    assert sorted(paths(site["nav"])) == sorted([*ours, "index.md", "contributing.md", "changelog.md"])
