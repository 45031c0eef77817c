"""Which rule of engine/config/rules.py refuses a setup, known by its line."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from isoloss.engine.config import rules as compatibility
from isoloss.engine.config.schema import Config
from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout


@dataclass(frozen=True)
class Refusal:
    """line: of the rule's `yield` in engine/config/rules.py."""

    key: str
    why: str
    line: int


def rule_lines() -> dict[str, list[int]]:
    """The lines of the rules, each a `yield`, by the function that they stand in."""
    module = ast.parse(Path(compatibility.__file__).read_text())
    return {
        function.name: [node.lineno for node in ast.walk(function) if isinstance(node, ast.Yield)]
        for function in module.body
        if isinstance(function, ast.FunctionDef) and any(isinstance(node, ast.Yield) for node in ast.walk(function))
    }


def first_refusal(config: Config, arch: Architecture, layout: Layout) -> Refusal:
    """As `rules.check` finds it; the setup must have one."""
    setup = compatibility.Setup(config, arch, layout)
    for subject in compatibility.SUBJECTS:
        rules = subject(setup)
        for key, why, _ in rules:
            return Refusal(key, why, rules.gi_frame.f_lineno)
    raise AssertionError(f"no rule refuses {setup}")


def silent(lines: Iterable[int], refusals: Iterable[Refusal]) -> list[int]:
    """The lines that no refusal came from."""
    return sorted(set(lines) - {refusal.line for refusal in refusals})
