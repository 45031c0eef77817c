"""The site loads nothing from elsewhere, and lists fields of docstrings. `make docs` builds it with these hooks."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = hook("site_check")


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://unpkg.com/iframe-worker/shim"></script>',
        '<script src="//host/a.js"></script>',
        '<link rel="stylesheet" href="https://fonts.googleapis.com/css">',
        '<link rel="preconnect" href="https://fonts.gstatic.com" crossorigin>',
        '<img src="http://host/a.png">',
        '<iframe src="https://host/"></iframe>',
        "<style>@font-face { src: url('https://host/a.woff2') }</style>",
        '<p style="background: url(https://host/a.png)">',
    ],
)
def test_what_comes_from_elsewhere(html, tmp_path, caplog):
    (tmp_path / "page.html").write_text(f"<html><body>{html}</body></html>")
    CHECK.on_post_build(SimpleNamespace(site_dir=tmp_path))
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # an error of mkdocs build --strict


@pytest.mark.parametrize(
    "html",
    [
        '<script src="assets/iframe-worker.js"></script>',
        '<a href="https://github.com/NVIDIA/Megatron-LM">a link is followed by a reader alone</a>',
        '<link rel="canonical" href="https://host/page.html">',
        '<img src="data:image/png;base64,AAAA">',
        "<code>src=https://host/a.js</code>",
    ],
)
def test_what_does_not(html, tmp_path, caplog):
    (tmp_path / "page.html").write_text(html)
    (tmp_path / "site.css").write_text("a { background: url(a.png) }")
    CHECK.on_post_build(SimpleNamespace(site_dir=tmp_path))
    assert caplog.records == []


def test_a_style_sheet_is_read(tmp_path):
    (tmp_path / "site.css").write_text('@import "https://host/a.css";')
    assert CHECK.from_elsewhere(tmp_path / "site.css") == ["https://host/a.css"]


def test_the_shim_of_the_search_is_a_file_of_the_site():
    """Material's offline plugin adds one of a public server unless a polyfill has this name."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (shim,) = site["extra"]["polyfills"]
    assert "iframe-worker" in shim and "IFrameWorker" not in shim
    assert "new " in (DOCS / shim).read_text() and {"docs/site_check.py"} <= set(site["hooks"])


FIELDS = """Return a thing.

first, second: two numbers, which go on
    in the next line.
third: another one, as in fields[k][t].
Collectives: none.
"""


@pytest.fixture
def api_fields(monkeypatch) -> ModuleType:
    griffe = SimpleNamespace(Extension=object, Object=object)
    monkeypatch.setitem(sys.modules, "griffe", griffe)  # belongs to the environment of the documentation
    return hook("api_fields")


def test_a_default_is_that_of_the_key(api_fields):
    assert api_fields.default_of('key(1, "Tensor parallelism, (tp).", at_least=1)') == "1"
    assert api_fields.default_of("math.inf") == "math.inf" and api_fields.default_of(None) is None


def test_fields_become_a_list(api_fields):
    assert api_fields.with_lists(FIELDS).splitlines() == [
        "Return a thing.",
        "",
        "",
        "- `first`, `second`: two numbers, which go on",
        "    in the next line.",
        "- `third`: another one, as in fields[k]\\[t].",
        "",
        "Collectives: none.",
    ]


def test_the_page_of_the_api_shows_both_packages():
    """By mkdocstrings, which follows __all__; each name has a docstring."""
    page = (DOCS / "api.md").read_text()
    for package in ("engine", "parallel"):
        assert f"\n::: isoloss.{package}\n" in page
        tree = ast.parse((ROOT / package / "__init__.py").read_text())
        names = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
                     and ast.unparse(node.targets[0]) == "__all__")  # fmt: skip
        files = [file for folder in ("engine", "models", "parallel") for file in (ROOT / folder).rglob("*.py")]
        trees = [ast.parse(file.read_text()) for file in files]
        nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        documented = {node.name for node in nodes if ast.get_docstring(node)}
        assert names and set(names) <= documented


def test_pictures_are_small_and_shown():
    pictures = sorted(DOCS.rglob("*.png"))
    assert sum(picture.stat().st_size for picture in pictures) < 1 << 20
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [picture.name for picture in pictures if f"]({picture.relative_to(DOCS)})" not in text] == []
