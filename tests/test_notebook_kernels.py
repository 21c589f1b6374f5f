"""notebooks/kernels_in_your_torch_trainer.ipynb runs from top to bottom, and shows what it gave."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "kernels_in_your_torch_trainer.ipynb"


def test_notebook_runs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    text = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert "the same loss and the same gradients" in text
    assert "CPU seconds" in text
