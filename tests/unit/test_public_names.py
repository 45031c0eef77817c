"""The names of isoloss.engine, which programs rely on, and the readable recipes, which use no others."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from isoloss import engine

ROOT = Path(__file__).parents[2]
PUBLIC = {"isoloss.engine", "isoloss.parallel"}


def test_every_name_is_there_and_documented():
    for name in engine.__all__:
        found = getattr(engine, name)
        assert inspect.getdoc(found), name
        assert found.__module__.startswith("isoloss.") and name in dir(engine)
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        getattr(engine, "Trainer")  # noqa: B009


def test_type_checkers_see_the_names_that_there_are():
    tree = ast.parse(Path(inspect.getfile(engine)).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {alias.name: node.module for node in imported for alias in node.names}
    for name in engine.__all__:
        module = found[name]
        assert module is not None
        assert getattr(importlib.import_module(module), name) is getattr(engine, name)


def test_every_public_method_and_property_is_documented():
    for name in ("Engine", "Loss", "Sample", "RunResult", "Callbacks"):
        cls = getattr(engine, name)
        members = [member for member in dir(cls) if not member.startswith("_")]
        assert [m for m in members if callable(getattr(cls, m, None)) and not inspect.getdoc(getattr(cls, m))] == []
        properties = [m for m in members if isinstance(inspect.getattr_static(cls, m), property)]
        assert [m for m in properties if not inspect.getdoc(inspect.getattr_static(cls, m))] == []


@pytest.mark.parametrize("recipe", ["minimal_sft", "minimal_rl"])
def test_a_readable_recipe_imports_public_names_alone(recipe):
    tree = ast.parse((ROOT / "recipes" / f"{recipe}.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in modules if module and module.startswith("isoloss")} <= PUBLIC


def test_a_configuration_imports_no_torch():
    code = "import sys; from isoloss.engine import Config, RLConfig, UserError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
