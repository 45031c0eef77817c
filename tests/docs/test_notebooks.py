"""The notebooks of docs/ run, cell by cell in one process, and hold what their cells print.

`cd tests; ../.venv/bin/python -m docs.test_notebooks` runs them in an empty folder and stores the new outputs.
"""

import ast
import base64
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
VALUE = re.compile(r"[0-9a-f]{16}|-?[\d.,]*\d(e-?\d+)?|'[^']*'")


def executed(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, as a notebook stores them: text, the last expression, and pictures."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    module = sys.modules["notebook"] = ModuleType("notebook")
    found = []
    for number, cell in enumerate(cells, start=1):
        tree, printed, value = ast.parse("".join(cell["source"])), io.StringIO(), None
        shown = isinstance(tree.body[-1], ast.Expr) and ";" not in cell["source"][-1]
        last = tree.body.pop() if shown else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"cell {number}", "exec"), vars(module))
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), vars(module))
        outputs: list[dict[str, Any]] = []
        if text := printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
        if value is not None:
            data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
            outputs.append({"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}})
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(picture, dpi=80, metadata={"Software": None})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        pyplot.close("all")
        found.append(outputs)
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outline(outputs: list[dict[str, Any]]) -> list[Any]:
    """Outputs without numbers and completions, which rounding and clocks decide, and of pictures their type."""
    text = lambda output: "".join(output.get("text") or output["data"]["text/plain"])
    return [(output["output_type"], VALUE.sub("#", text(output))) for output in outputs]


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_prints_what_it_holds(path, tmp_path, monkeypatch, one_rank):
    monkeypatch.chdir(tmp_path)
    cells = code_cells(json.loads(path.read_text()))
    assert sum("image/png" in output.get("data", ()) for cell in cells for output in cell["outputs"]) == 1
    for cell, outputs in zip(cells, executed(cells), strict=True):
        assert outline(outputs) == outline(cell["outputs"]), "".join(cell["source"])


if __name__ == "__main__":
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        cells = code_cells(notebook)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for number, (cell, outputs) in enumerate(zip(cells, executed(cells), strict=True), start=1):
                cell |= {"outputs": outputs, "execution_count": number}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
