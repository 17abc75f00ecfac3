"""The notebook of the first ten minutes runs from its first cell to its last, and is committed
without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "recipes/lab/first_ten_minutes.ipynb"


def test_the_notebook_is_valid_and_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it builds the lab's base model first
def test_every_cell_runs_with_few_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_STEPS", "3")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The kernel's; an editable install may be of another checkout
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NotebookClient(
        notebook, timeout=1500, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    run = tmp_path / "outputs/grpo/first-ten-minutes"
    assert (run / "report.html").exists() and (run / "trace.html").exists()
    shown = "".join(
        str(output)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "step   3" in shown and "<svg" in shown
