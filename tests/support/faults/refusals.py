"""Which rule of engine/config/rules.py, or of a kind in models/kinds/, refuses a setup, known by its line."""

import ast
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss.engine.config import rules as compatibility
from isoloss.engine.config.schema import Config
from isoloss.models import kinds
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.kind import Attention
from isoloss.parallel import Layout

Place = tuple[str, int]  # file and line of a `yield`
# Functions of kinds whose `yield`s are rules.
OF_KINDS = ("refusals", "fused_kernel_refusals")


@dataclass(frozen=True)
class Refusal:
    """place: that of the rule."""

    key: str
    why: str
    place: Place


def rule_places() -> dict[str, list[Place]]:
    """The places of the rules, by the function that they stand in."""
    places: dict[str, list[Place]] = {}
    for path in (Path(compatibility.__file__), *Path(kinds.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and (path.name == "rules.py" or function.name in OF_KINDS):
                lines = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Yield)]
                places.setdefault(function.name, []).extend((path.name, line) for line in lines)
    return places


def first_refusal(config: Config, arch: Architecture, layout: Layout) -> Refusal:
    """As `rules.check` finds it; the setup must have one."""
    setup = compatibility.Setup(config, arch, layout)
    for subject in compatibility.SUBJECTS:
        rules = subject(setup)
        for key, why, _ in rules:
            return Refusal(key, why, next(_of_kinds(arch, layout, why), _place(rules)))
    raise AssertionError(f"no rule refuses {setup}")


def _of_kinds(arch: Architecture, layout: Layout, why: str) -> Iterator[Place]:
    """The places of rules of kinds that say so."""
    for kind in arch.kinds:
        sources: list[Generator] = [kind.refusals(layout)]
        if isinstance(kind, Attention):
            sources.append(kind.fused_kernel_refusals(arch.family))
        for source in sources:
            yield from (_place(source) for said in source if why in (said, said[1]))


def _place(generator: Any) -> Place:
    """Where it, or the one that it yields from, stands."""
    while generator.gi_yieldfrom is not None:
        generator = generator.gi_yieldfrom
    return Path(generator.gi_code.co_filename).name, generator.gi_frame.f_lineno


def silent(places: Iterable[Place], refusals: Iterable[Refusal]) -> list[Place]:
    """The places that no refusal came from."""
    return sorted(set(places) - {refusal.place for refusal in refusals})
