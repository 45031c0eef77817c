"""Measure how the modules of the product import each other, folder by folder.

    python -m isoloss.tools.dev.imports                              # this checkout, as a Markdown table
    python tools/dev/imports.py --root ../older-checkout --json      # another one; needs the standard library only

Reads the source of every module and imports none. An import counts wherever it stands: at the top of a module, inside a
function, or under `if TYPE_CHECKING`, because a reader follows all three. A name that a package has from one of its
modules counts as an import of that module. Modules that are named in strings (families in their registry, functions
that a planted bug replaces) are not imports.

The columns, for a folder whose entries are the files and folders directly inside it:

entries       without `__init__.py`
arrows        pairs of entries of which the first imports the second; a folder imports what any of its modules does
levels        entries on the longest chain of arrows; a circle counts as one entry
circles       groups of entries that import each other, directly or through others
upward        imports in it against the order recipes, tools -> engine -> models -> parallel
doors         modules in it, at any depth, that modules outside it import, of all modules in it
lines         of all modules in it
one importer  modules in it that exactly one module of the product imports, and their lines
"""

import argparse
import ast
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]  # the checkout, though a link may lead here
# The folders that each folder of the product may import, apart from itself.
ALLOWED = {
    "parallel": set(),
    "models": {"parallel"},
    "engine": {"parallel", "models"},
    "recipes": {"parallel", "models", "engine"},
    "tools": {"parallel", "models", "engine", "recipes"},  # a tool reads a recipe's configuration
}
INIT = "__init__.py"
Arrows = Mapping[str, set[str]]  # from each node to the nodes that it imports


@dataclass(frozen=True)
class Import:
    """An imported name.

    importer: path of the module that imports, from the root of the checkout.
    name: absolute and dotted; `from a import b` gives a.b.
    target: path of the imported module; None outside the tree.
    """

    importer: str
    line: int
    name: str
    target: str | None

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


@dataclass(frozen=True)
class Tree:
    """The modules by path, with their numbers of lines, and every import in them."""

    lines: Mapping[str, int]
    imports: Sequence[Import]

    @cached_property
    def links(self) -> list[tuple[str, str, Import]]:
        """Yield imports of one module of the tree by another: importer, target, import."""
        pairs = [(i.importer, i.target, i) for i in self.imports]
        return [(importer, target, i) for importer, target, i in pairs if target is not None and target != importer]

    @cached_property
    def modules(self) -> dict[str, set[str]]:
        """Return arrows between modules."""
        return _arrows(self.lines, ((importer, target) for importer, target, _ in self.links))

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """Return arrows between modules, reversed."""
        return _arrows(self.lines, ((target, importer) for importer, target, _ in self.links))

    def folders(self) -> list[str]:
        """Return folders with modules, at any depth. The first is the root, ""."""
        return sorted({str(parent).removeprefix(".") for path in self.lines for parent in PurePosixPath(path).parents})

    def between(self, folder: str) -> dict[tuple[str, str], list[Import]]:
        """Return the imports behind every arrow between two entries of the folder."""
        found: dict[tuple[str, str], list[Import]] = {}
        for importer, target, link in self.links:
            start, end = entry_of(importer, folder), entry_of(target, folder)
            if start is not None and end is not None and start != end:
                found.setdefault((start, end), []).append(link)
        return found

    def arrows(self, folder: str) -> dict[str, set[str]]:
        """Return arrows between the entries of the folder."""
        entries = {entry for path in self.lines if (entry := entry_of(path, folder)) is not None}
        return _arrows(sorted(entries), self.between(folder))


def entry_of(path: str, folder: str) -> str | None:
    """Return the folder's entry that holds the module; None outside, and for the folder's `__init__.py`."""
    inside = path.removeprefix(f"{folder}/") if folder else path
    return None if inside == INIT or (folder and inside == path) else inside.split("/")[0]


def sources(root: Path, folders: Iterable[str] = ALLOWED) -> dict[str, str]:
    """Read the source of every module of these folders, by path from the root; without hidden folders, though the root
    may be in one."""
    paths = [path.relative_to(root) for folder in folders for path in (root / folder).rglob("*.py")]
    shown = [path for path in sorted(paths) if not any(part.startswith(".") for part in path.parts)]
    return {path.as_posix(): (root / path).read_text() for path in shown}


def read(modules: Mapping[str, str]) -> Tree:
    """Build the tree. modules: sources by path, such as "parallel/mesh.py"."""
    names = {path: list(_imported(path, source)) for path, source in modules.items()}
    # Origins of the names of a package; of two imports of a name the later one holds, as when Python runs them.
    origins = {
        path: {name.rpartition(".")[2]: name for _, name in found}
        for path, found in names.items()
        if path.endswith(f"/{INIT}")
    }
    imports = [
        Import(path, line, name, _target(name, modules.keys(), origins))
        for path, found in names.items()
        for line, name in found
    ]
    return Tree({path: len(source.splitlines()) for path, source in modules.items()}, imports)


def _imported(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield lines and absolute names of all imports in a module."""
    package = ("isoloss", *PurePosixPath(path).parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _target(name: str, paths: Collection[str], origins: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return the module that a dotted name names or is in."""
    top, *parts = name.split(".")
    for length in range(len(parts) if top == "isoloss" else 0, 0, -1):
        stem = "/".join(parts[:length])
        if f"{stem}.py" in paths:
            return f"{stem}.py"
        package = f"{stem}/{INIT}"
        if package in paths:
            origin = origins[package].get(parts[length]) if length < len(parts) else None
            return package if origin in (None, name) else _target(str(origin), paths, origins) or package
    return None


def _arrows(nodes: Iterable[str], pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {node: set() for node in nodes}
    for start, end in pairs:
        found[start].add(end)
    return found


def circles(arrows: Arrows) -> list[tuple[str, ...]]:
    """Return groups of nodes that reach each other, each group once."""
    reached = {node: _reached(node, arrows) for node in arrows}
    groups = ((other for other in reached[node] if node in reached[other]) for node in arrows if node in reached[node])
    return sorted({tuple(sorted(group)) for group in groups})


def _reached(start: str, arrows: Arrows) -> set[str]:
    """Return all nodes at the end of a chain of arrows; `start` itself only if it is in a circle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = arrows[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def levels(arrows: Arrows) -> int:
    """Count nodes on the longest chain, of every circle only one."""
    groups = {node: node for node in arrows} | {node: group[0] for group in circles(arrows) for node in group}
    pairs = ((groups[start], groups[end]) for start in arrows for end in arrows[start])
    below = _arrows(groups.values(), (pair for pair in pairs if pair[0] != pair[1]))
    heights: dict[str, int] = {}

    def height(group: str) -> int:
        if group not in heights:
            heights[group] = 1 + max(map(height, below[group]), default=0)
        return heights[group]

    return max(map(height, below), default=0)


def upward(tree: Tree) -> list[Import]:
    """Return imports against the order of the five folders."""
    tops = [(importer.split("/")[0], target.split("/")[0], link) for importer, target, link in tree.links]
    return [link for top, target, link in tops if target not in ALLOWED[top] | {top}]


@dataclass(frozen=True)
class Measures:
    """Figures of a folder, defined at the top of this file."""

    folder: str
    entries: int
    arrows: int
    levels: int
    circles: Sequence[Sequence[str]]
    upward: Sequence[str]
    doors: int
    modules: int
    lines: int
    one_importer: int
    one_importer_lines: int

    def row(self) -> str:
        counts = (self.entries, self.arrows, self.levels, len(self.circles), len(self.upward))
        doors = f"{self.doors} of {self.modules}"
        name = f"{self.folder}/" if self.folder else "whole tree"
        return _row(name, *counts, doors, self.lines, f"{self.one_importer} ({self.one_importer_lines})")


def measure(tree: Tree, folder: str) -> Measures:
    """Measure a folder. folder: path from the root; "" for the whole tree."""
    inside = {path for path in tree.lines if not folder or path.startswith(f"{folder}/")}
    arrows = tree.arrows(folder)
    alone = [path for path in inside if len(tree.importers[path]) == 1]
    return Measures(
        folder=folder,
        entries=len(arrows),
        arrows=sum(map(len, arrows.values())),
        levels=levels(arrows),
        circles=circles(arrows),
        upward=[str(link) for link in upward(tree) if link.importer in inside],
        doors=sum(not tree.importers[path] <= inside for path in inside),
        modules=len(inside),
        lines=sum(tree.lines[path] for path in inside),
        one_importer=len(alone),
        one_importer_lines=sum(tree.lines[path] for path in alone),
    )


def table(rows: Iterable[Measures]) -> str:
    """Format measures as a Markdown table."""
    names = ("entries", "arrows", "levels", "circles", "upward", "doors", "lines", "one importer (lines)")
    return "\n".join([_row("folder", *names), _row("---", *("---:" for _ in names)), *(row.row() for row in rows)])


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="a checkout; default: this one")
    parser.add_argument("--json", action="store_true", help="JSON, which names the circles and the upward imports")
    options = parser.parse_args(argv)
    tree = read(sources(options.root))
    rows = [measure(tree, folder) for folder in tree.folders()]
    of_modules = circles(tree.modules)
    if options.json:
        print(json.dumps({"folders": [asdict(row) for row in rows], "circles_of_modules": of_modules}, indent=2))
        return
    print(table(rows))
    for circle in of_modules:
        print(f"\ncircle of modules: {', '.join(circle)}")


if __name__ == "__main__":
    main()
