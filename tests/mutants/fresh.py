"""Draws one-line bugs at random, and finds out which rows of the tests notice them: make fresh-mutants.

    .venv/bin/python tests/mutants/fresh.py FILE.toml [--count 300] [--seed 0] [--jobs 2] [--slow]

A bug is a line of engine, models or parallel, and a change that Cosmic Ray knows for it; every line that can be changed
is as likely as every other. FILE.toml is a catalogue like those beside this file; if it is there, its mutants are taken
instead of new ones.

1. The rows of `make test-all` run once with a probe in every function that holds a mutant: who comes by?
2. Each mutant meets the rows that do, the cheapest first, until one fails.
3. With --slow, what survives is planted together, and the rows of `make prove-all` run on it. What fails there and
   passes without is halved until the mutants are found that it notices: each wants a row in `make test-all`.

What is found is kept in FILE.jsonl, and a run that was ended goes on from there.
"""

import argparse
import ast
import json
import random
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pinned
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from parso.tree import NodeOrLeaf
from run import ALL, FAILED, NO_TESTS, PASSED, PRELOAD, ROOT, SECONDS_UNTOUCHED, Copies, Copy, Mutant, find_pin

PACKAGES = ("engine", "models", "parallel")
SLOW = "slow and not sglang and not docs and not gpu"
# Without those that need arguments.
OPERATORS = {name: plugins.get_operator(name) for name in plugins.operator_names()}
OPERATORS = {name: operator() for name, operator in OPERATORS.items() if not operator.arguments()}
# What a probe calls: it leaves a file in a folder that the tests' process empties after every row.
PROBE = """
import os

def passed(number):
    try:
        os.close(os.open(f"{folder}/{{number}}", os.O_CREAT | os.O_EXCL))
    except OSError:
        pass
"""


def annotates(node: NodeOrLeaf) -> bool:
    """Whether the node is of an annotation, which nothing evaluates."""
    while (parent := node.parent) is not None:
        if parent.type == "annassign" and node is parent.children[1]:
            return True
        if parent.type == "tfpdef" or (parent.type == "funcdef" and node is parent.annotation):
            return True
        node = parent
    return False


def changes(source: str) -> dict[int, list[tuple[str, int]]]:
    """By line: the operators that change it, each with the number of the occurrence in the file."""
    nodes = list(ast_nodes(get_ast(source)))
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, operator in OPERATORS.items():
        places = [(node, begin[0]) for node in nodes for begin, _ in operator.mutation_positions(node)]
        for occurrence, (node, line) in enumerate(places):
            if not annotates(node):
                found[line].append((name, occurrence))
    return found


def mutant_of(root: Path, path: Path, operator: str, occurrence: int, number: int) -> Mutant | None:
    """None where more or less than a line changes."""
    source = (root / path).read_text()
    before, after = source.split("\n"), (mutate_code(source, OPERATORS[operator], occurrence) or source).split("\n")
    changed = [line for line, (old, new) in enumerate(zip(before, after)) if old != new]
    if len(before) != len(after) or len(changed) != 1:
        return None
    first = last = changed[0]
    while source.count(text := "\n".join(before[first : last + 1])) > 1:  # with neighbours, until it occurs once
        first, last = max(0, first - 1), last + 1
    name = f"fresh-{number}-{path.stem}-{changed[0] + 1}"
    return Mutant(name, str(path), text, "\n".join(after[first : last + 1]), operator.removeprefix("core/"), ())


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    chance = random.Random(seed)
    files = sorted(path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*.py"))
    lines = [(path, found) for path in files for _, found in sorted(changes((root / path).read_text()).items())]
    chance.shuffle(lines)
    drawn: list[Mutant] = []
    for path, found in lines:
        if len(drawn) < count and (mutant := mutant_of(root, path, *chance.choice(found), len(drawn))):
            drawn.append(mutant)
    return drawn


def function_of(source: str, mutant: Mutant) -> int | None:
    """The line, from 1, before which a probe of the innermost function that holds the mutant belongs."""
    old, new = mutant.before.split("\n"), mutant.after.split("\n")
    line = source[: source.index(mutant.before)].count("\n") + 1
    line += next(place for place, pair in enumerate(zip(old, new)) if pair[0] != pair[1])
    inside = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or 0)
    ]
    if not inside:
        return None
    (*_, innermost) = sorted(inside, key=lambda node: node.lineno)
    documented = ast.get_docstring(innermost) is not None and len(innermost.body) > 1
    first = innermost.body[1 if documented else 0]
    lines = [first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", ()))]
    return min(lines) if min(lines) > innermost.lineno else None


def with_probes(root: Path, mutants: Iterable[Mutant]) -> dict[str, str]:
    """Files of the repository with a probe for each mutant in a function."""
    by_file: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for mutant in mutants:
        if (line := function_of((root / mutant.file).read_text(), mutant)) is not None:
            by_file[mutant.file].append((line, mutant.name))
    texts = {}
    for file, probes in by_file.items():
        lines = (root / file).read_text().split("\n")
        for line, name in sorted(probes, reverse=True):
            indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
            lines.insert(line - 1, f'{indent}__import__("mutant_probes").passed("{name}")')
        texts[file] = "\n".join(lines)
    return texts


class Kept:
    """What is found, by lines of JSON: rows with their seconds and whom they pass, pins, what only slow rows notice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: set[str] = set()  # of tests, whose rows are all here
        self.rows: dict[str, tuple[list[float], list[str]]] = {}
        self.pins: dict[str, pinned.Pin] = {}
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            self._take(line)

    def _take(self, line: dict) -> None:
        if "rows" in line:
            self.files.add(line["file"])
            self.rows |= {row: (seconds, passed) for row, seconds, passed in line["rows"]}
        else:
            self.pins[line["mutant"]] = pinned.Pin(**line)

    def add(self, line: dict) -> None:
        self._take(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def rows_that_pass(self, mutant: Mutant, mutants: Sequence[Mutant]) -> list[pinned.Row]:
        """The cheapest first. Of a mutant in no function, which runs at import, those of all in its file."""
        alike = {mutant.name}
        if not any(mutant.name in passed for _, passed in self.rows.values()):
            alike = {other.name for other in mutants if other.file == mutant.file}
        rows = [pinned.Row(row, *seconds) for row, (seconds, passed) in self.rows.items() if alike & set(passed)]
        return sorted(rows, key=lambda row: (row.seconds, row.name))


def reach(copy: Copy, file: str, root: Path, probed: Mapping[str, str]) -> dict:
    """The rows of a file of tests, their seconds, and the names of the mutants whose functions they run."""
    folder = copy.folder / ".probes"
    folder.mkdir(exist_ok=True)
    (copy.folder / ".links/mutant_probes.py").write_text(PROBE.format(folder=folder))
    copy.change(probed)
    try:
        status, told, record = copy.test([file], ALL, SECONDS_UNTOUCHED, options=(), reached=str(folder))
    finally:
        copy.restore(root)
    if status not in (PASSED, FAILED, NO_TESTS):
        raise ValueError(f"{file} could not be run:\n{told}")
    if record.failed:
        print(f"{record.failed}: fails with probes", flush=True)
    return {"file": file, "rows": [[row, record.seconds[row], record.reached.get(row, [])] for row in record.seconds]}


def try_together(copy: Copy, root: Path, mutants: Sequence[Mutant], row: str) -> bool:
    """Whether the row fails with all of these planted."""
    copy.change(together(root, mutants))
    try:
        return copy.test([row.partition("[")[0]], SLOW, rows={row: 300.0})[0] == FAILED
    finally:
        copy.restore(root)


def together(root: Path, mutants: Iterable[Mutant]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for mutant in mutants:
        text = texts.get(mutant.file, (root / mutant.file).read_text())
        if text.count(mutant.before) == 1:  # else it is a neighbour of one that is there
            texts[mutant.file] = text.replace(mutant.before, mutant.after)
    return texts


def blame(copy: Copy, root: Path, mutants: Sequence[Mutant], row: str) -> Mutant | None:
    """One mutant because of which the row fails, by halves; None where it fails without, or of several together."""
    while len(mutants) > 1:
        half = len(mutants) // 2
        for part in (mutants[:half], mutants[half:]):
            if try_together(copy, root, part, row):
                mutants = part
                break
        else:
            return None
    return mutants[0] if mutants and try_together(copy, root, mutants, row) else None


def slow_rows(copies: Copies, root: Path, files: Sequence[str], left: list[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Each of the mutants `left` that a slow row notices, with the row; it is taken from `left`."""

    def run(copy: Copy, file: str) -> list[str]:
        copy.change(together(root, left))
        try:
            return copy.test([file], SLOW, SECONDS_UNTOUCHED, options=())[2].failures
        finally:
            copy.restore(root)

    for failures in copies.map(run, files):
        for row in failures:
            (noticed,) = copies.map(lambda copy, row: blame(copy, root, list(left), row), [row])
            if noticed is not None:
                left.remove(noticed)
                yield noticed, row


def main(argv: Sequence[str] | None = None, root: Path = ROOT, preload: Sequence[str] = PRELOAD) -> int:
    parser = argparse.ArgumentParser(description="Draw one-line bugs at random, and find the rows that notice them.")
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--slow", action="store_true", help="let the rows of make prove-all look at what survives")
    arguments = parser.parse_args(argv)
    if not arguments.file.exists():
        entries = (asdict(mutant) for mutant in draw(root, arguments.count, arguments.seed))
        texts = ("".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items()) for entry in entries)
        arguments.file.write_text("\n".join(f"[[mutant]]\n{text}" for text in texts))
    drawn = tomllib.loads(arguments.file.read_text())["mutant"]
    mutants = [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in drawn]
    kept = Kept(arguments.file.with_suffix(".jsonl"))
    files = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))
    with Copies(root, arguments.jobs, preload) as copies:
        left = [file for file in files if file not in kept.files]
        for found in copies.map(partial(reach, root=root, probed=with_probes(root, mutants)), left):
            kept.add(found)

        def judge(copy: Copy, mutant: Mutant) -> pinned.Pin:
            return find_pin(copy, mutant, root, kept.rows_that_pass(mutant, mutants))

        for pin in copies.map(judge, [mutant for mutant in mutants if mutant.name not in kept.pins]):
            kept.add(asdict(pin))
            print(f"{pin.verdict:8}  {pin.wall:6.1f} s  {pin.mutant:40}  {pin.row or pin.told}", flush=True)
        survivors = [mutant for mutant in mutants if kept.pins[mutant.name].verdict == "SURVIVED"]
        print(f"{len(mutants) - len(survivors)} of {len(mutants)} are noticed by make test-all")
        if arguments.slow:
            for mutant, row in slow_rows(copies, root, files, survivors):
                print(f"SLOW      {mutant.name:40}  {row}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
