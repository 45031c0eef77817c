"""Imports go one way (recipes, tools -> engine -> models -> parallel), read from the source of every module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What each folder may import besides itself.
ALLOWED = {
    "parallel": set(),
    "models": {"parallel"},
    "engine": {"parallel", "models"},
    "tools": {"parallel", "models", "engine", "recipes"},  # a tool reads a recipe's configuration
    "recipes": {"parallel", "models", "engine"},
}
# What each wing of models/ may import besides itself, of the other wings.
WINGS = {"weights": set(), "families": {"weights"}, "mcore": {"weights"}, "conversion": {"families", "weights"}}
PATCHES = "models/mcore/patches.py"
TESTS = ("tests", "benchmarks")
PARALLEL_STATE = "megatron.core.parallel_state"
# The second runs another project's library in an environment without isoloss.
TOUCH_PARALLEL_STATE = {"parallel/mesh.py", "tests/oracles/mbridge/make_hashes.py"}


def modules(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if not any(part.startswith(".") for part in p.parts))


def imported(source: str, package: str) -> Iterator[str]:
    """Absolute dotted names of everything that a module of `package` imports, anywhere in it; `from a import b` gives
    a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    return ".".join(["isoloss", *path.relative_to(ROOT).parent.parts])


def faults(path: str, source: str, package: str) -> list[str]:
    """What the module breaks, one line each."""
    folder = package.split(".")[1]
    found = []
    for name in imported(source, package):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top in ALLOWED:
            found.append(f"{path}: import isoloss.{top}, not {name}, which is a second copy of the module")
        if top == "isoloss" and folder in ALLOWED and target not in {folder} | ALLOWED[folder]:
            found.append(f"{path}: {folder} must not import {name}")
        wing, other = (
            ([*package.split(".")[2:], ""][0], rest.split(".")[1]) if target == "models" and "." in rest else ("", "")
        )
        if folder == "models" and wing in WINGS and other in WINGS.keys() - WINGS[wing] - {wing}:
            found.append(f"{path}: models/{wing} must not import {name}")
        if (name + ".").startswith(PARALLEL_STATE + ".") and path not in TOUCH_PARALLEL_STATE:
            found.append(f"{path}: only parallel/mesh.py touches {PARALLEL_STATE}")
    if folder in ALLOWED and path != PATCHES:
        found += [f"{path}: only {PATCHES} patches Megatron: {text}" for text in patches(source)]
    return found


def patches(source: str) -> Iterator[str]:
    """Assignments to an attribute of something imported from Megatron, or to a private one of another object."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    megatron = {a.asname or a.name for n in nodes if str(n.module).startswith("megatron") for a in n.names}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in (t for t in flat if isinstance(t, ast.Attribute)):
            root = ast.unparse(target).split(".")[0]
            private = target.attr.startswith("_") and not target.attr.startswith("__")
            if root in megatron or (private and root not in ("self", "cls", "torch", "cuda")):
                yield ast.unparse(node)


@pytest.mark.parametrize("folder", [*ALLOWED, *TESTS])
def test_imports_go_one_way(folder):
    paths = modules(folder)
    assert paths or folder == "benchmarks"
    found = [f for p in paths for f in faults(str(p.relative_to(ROOT)), p.read_text(), package_of(p))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("parallel/x.py", "from isoloss.models import gpt"),
        ("parallel/x.py", "def f():\n    import isoloss.engine.step"),
        ("models/x.py", "from isoloss import engine"),
        ("models/x.py", "from ..engine import step"),
        ("engine/rl/x.py", "from ...recipes import sft"),
        ("engine/x.py", "from isoloss.tools.pool import WorkerPool"),
        ("recipes/x.py", "from isoloss.tools import pool"),
        ("engine/x.py", "import models.gpt"),
        ("tests/unit/x.py", "from engine.step import run_step"),
        ("engine/x.py", "from megatron.core import parallel_state as mpu"),
        ("models/x.py", "import megatron.core.parallel_state"),
        ("tests/unit/x.py", "from megatron.core.parallel_state import get_data_parallel_group"),
        ("models/weights/x.py", "from isoloss.models.families.registry import hf_folder"),
        ("models/families/x.py", "from isoloss.models.mcore import build"),
        ("models/mcore/x.py", "from isoloss.models.conversion.transfer import run"),
        ("engine/x.py", "from megatron.core import optimizer\noptimizer.Adam = None"),
        ("models/mcore/x.py", "from megatron.core.a import B\nB.__init__.__defaults__ = (None,)"),
        ("engine/x.py", "def f(part):\n    part._move, other = None, 1"),
    ],
)
def test_the_rule_finds(path, source):
    assert faults(path, source, package_of(ROOT / path))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("parallel/mesh.py", "from megatron.core import parallel_state"),
        ("engine/x.py", "from isoloss.parallel.mesh import Mesh\nfrom isoloss.models import gpt\nfrom . import step"),
        ("engine/rl/x.py", "from ..step import run_step"),
        ("tools/x.py", "import isoloss.engine.engine, toolshed"),
        ("tests/unit/x.py", "from isoloss.tools import pool\nimport support.vocab"),
        (
            "models/conversion/x.py",
            "from isoloss.models.weights import manifest\nfrom isoloss.models.families import llama",
        ),
        ("models/mcore/patches.py", "from megatron.core import optimizer\noptimizer.Adam = None"),
    ],
)
def test_the_rule_lets_pass(path, source):
    assert not faults(path, source, package_of(ROOT / path))
