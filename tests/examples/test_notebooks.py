"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import json
import linecache

import matplotlib
import pytest

from lab.house.source import ROOT

NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


def cells_of(path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def execute(path) -> dict:
    """Run the code cells in one namespace. The DSL reads source code, so their lines are kept."""
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(path)):
        if cell["cell_type"] == "code":
            file, text = f"<{path.name}, cell {number}>", "".join(cell["source"])
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            exec(compile(text, file, "exec"), names)
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, capsys):
    """Their assertions hold, and they print no finding other than the one that they explain."""
    matplotlib.use("agg")
    execute(path)
    printed = capsys.readouterr().out
    assert printed.count("error: ") == (path.stem == "debugging_a_race")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs(path):
    code = [cell for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
