"""The notebook of examples/, executed by a real kernel: it has an event loop, and its functions are in __main__."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.release)])
def test_the_notebook_runs_and_learns(tmp_path, monkeypatch, runtime):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('RUNTIME = "local"', f'RUNTIME = "{runtime}"')
    client = NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()  # raises CellExecutionError with the traceback of the cell
    *_, trained, printed, evaluated = (cell for cell in notebook.cells if cell.cell_type == "code")
    shown = next(output for output in trained.outputs if output.output_type == "execute_result")
    assert "data:image/png;base64," in shown.data["text/html"] and "held-out accuracy" in shown.data["text/html"]
    lines = "".join(output.text for output in printed.outputs).splitlines()
    first, last = (float(word) for word in lines[0].removeprefix("reward ").split(" -> "))
    assert first < 0.5 and last > 0.8 and len(lines) in (3, 5)
    row = next(output for output in evaluated.outputs if output.output_type == "execute_result").data["text/plain"]
    assert "'eval/prompts': 20" in row and "'eval/pass@4'" in row
    assert (tmp_path / "runs" / "notebook" / "step_15").is_dir()
