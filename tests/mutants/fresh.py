"""Draws one-line bugs at random, and finds out which rows of the tests notice them: make fresh-mutants.

    .venv/bin/python tests/mutants/fresh.py FILE.toml [--count 300] [--seed 0] [--jobs 2] [--slow]

A bug is a line of engine, models or parallel, and a change that Cosmic Ray knows for it; every line that can be changed
is as likely as every other. FILE.toml is a catalogue like those beside this file; if it is there, its mutants are taken
instead of new ones.

1. The rows of `make test-all` run once with a probe in every function that holds a mutant: who comes by?
2. Each mutant meets the rows that do, the cheapest first, until one fails or 20 CPU seconds are used.
3. What survives is planted together, and all rows of `make test-all` run on it, with --slow those of `make prove-all`
   too. What fails there is halved until the mutants are found that it notices. A mutant that only a slow row notices
   wants a row in `make test-all`.

What is found is kept in FILE.jsonl, and a run that was ended goes on from there.
"""

import argparse
import ast
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path

import pinned
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from parso.tree import NodeOrLeaf
from run import (
    ALL,
    FAILED,
    NO_TESTS,
    PASSED,
    PRELOAD,
    ROOT,
    SECONDS_UNTOUCHED,
    Copies,
    Copy,
    Mutant,
    Record,
    find_pin,
    read_mutants,
    run_rows,
)

PACKAGES = ("engine", "models", "parallel")
EVERY = "not sglang and not docs and not gpu"
SECONDS_ALONE = 20.0  # CPU seconds of rows that a mutant meets alone
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


def reach(copy: Copy, file: str, probed: Mapping[str, str]) -> Record:
    """What became of the rows of a file of tests, and the mutants whose functions they run."""
    folder = copy.folder / ".probes"
    folder.mkdir(exist_ok=True)
    (copy.folder / ".links/mutant_probes.py").write_text(PROBE.format(folder=folder))
    with copy.changed(probed):
        status, told, record = copy.test([file], ALL, SECONDS_UNTOUCHED, options=(), reached=str(folder))
    if status not in (PASSED, FAILED, NO_TESTS):
        raise ValueError(f"{file} could not be run:\n{told}")
    for row in record.failures:
        print(f"{row}: fails with probes", flush=True)
    return record


def rows_by_mutant(found: pinned.Found, mutants: Iterable[Mutant]) -> dict[str, set[str]]:
    """The rows that run its function; of a mutant in no function, which runs at import, those of all in its file, and
    all rows where there are none."""
    by_probe: dict[str, set[str]] = defaultdict(set)
    by_file: dict[str, set[str]] = defaultdict(set)
    file_of = {mutant.name: mutant.file for mutant in mutants}
    for reached in found.reached.values():
        for row, probes in reached.items():
            for probe in probes:
                by_probe[probe].add(row)
                by_file[file_of[probe]].add(row)
    every = set(found.seconds)
    return {name: by_probe[name] or by_file[file] or every for name, file in file_of.items()}


def blame(copy: Copy, mutants: Sequence[Mutant], row: str) -> Mutant | None:
    """One mutant because of which the row fails, by halves; None where it fails without, or of several together."""

    def fails(part: Sequence[Mutant]) -> bool:
        with copy.planted(*part):
            return run_rows(copy, [pinned.Row(row, pinned.UNKNOWN, pinned.UNKNOWN)], EVERY)[0] == FAILED

    if not mutants or not fails(mutants) or fails([]):
        return None
    while len(mutants) > 1:
        half = len(mutants) // 2
        failing = next((part for part in (mutants[:half], mutants[half:]) if fails(part)), None)
        if failing is None:
            return None
        mutants = failing
    return mutants[0]


def together(
    copies: Copies, files: Iterable[str], survivors: Iterable[Mutant], tier: str
) -> Iterator[tuple[Mutant, str]]:
    """Each of the survivors that a row notices, with the row."""
    left = list(survivors)

    def run(copy: Copy, file: str) -> list[str]:
        with copy.planted(*survivors):
            return copy.test([file], tier, SECONDS_UNTOUCHED, options=())[2].failures

    for row in [row for failures in copies.map(run, files) for row in failures]:
        # One row may notice several.
        while (noticed := next(copies.map(lambda copy, row: blame(copy, left, row), [row]))) is not None:
            left.remove(noticed)
            yield noticed, row


def within(rows: Sequence[pinned.Row], seconds: float) -> list[pinned.Row]:
    """The first rows that take so long, and one at least."""
    ends = accumulate(row.seconds for row in rows)
    return [row for place, (row, end) in enumerate(zip(rows, ends)) if place == 0 or end <= seconds]


def main(argv: Sequence[str] | None = None, root: Path = ROOT, preload: Sequence[str] = PRELOAD) -> int:
    parser = argparse.ArgumentParser(description="Draw one-line bugs at random, and find the rows that notice them.")
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--slow", action="store_true", help="let the rows of make prove-all look at survivors too")
    arguments = parser.parse_args(argv)
    if not arguments.file.exists():
        entries = (asdict(mutant) for mutant in draw(root, arguments.count, arguments.seed))
        texts = ("".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items()) for entry in entries)
        arguments.file.write_text("\n".join(f"[[mutant]]\n{text}" for text in texts))
    mutants = read_mutants(arguments.file)
    found = pinned.Found(arguments.file.with_suffix(".jsonl"), fresh=False)
    files = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))
    with Copies(root, arguments.jobs, preload) as copies:
        left = [file for file in files if file not in found.reached]
        records = copies.map(partial(reach, probed=with_probes(root, mutants)), left)
        for file, record in zip(left, records):
            found.add_seconds(record.seconds)
            found.add_reached(file, {row: record.reached[row] for row in record.seconds})

        rows = rows_by_mutant(found, mutants)

        def judge(copy: Copy, mutant: Mutant) -> pinned.Pin:
            return find_pin(copy, mutant, within(found.by_seconds(rows[mutant.name]), SECONDS_ALONE))

        for pin in copies.map(judge, [mutant for mutant in mutants if not found.has(mutant)]):
            found.add_pin(pin)
            print(pin, flush=True)
        survivors = [mutant for mutant in mutants if (pin := found.pin_of(mutant)) and pin.verdict == "SURVIVED"]
        print(f"{len(mutants) - len(survivors)} of {len(mutants)} were noticed alone", flush=True)
        for mutant, row in together(copies, files, survivors, EVERY if arguments.slow else ALL):
            verdict = "together" if row in found.seconds else "SLOW"
            print(f"{verdict:8}  {mutant.name:40}  {row}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
