"""Every notebook in notebooks/ runs from top to bottom in a real kernel, and learns what it says;
a kernel's interrupt ends a training step in it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from support import ROOT
from tinsmith.demo.demo import MODEL

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_gave_and_nothing_of_the_machine(path: Path) -> None:
    """Its outputs are those of one run from top to bottom, without warnings and paths."""
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = json.dumps([cell.outputs for cell in cells])
    assert "stderr" not in shown
    assert str(Path.home()) not in shown
    assert "site-packages" not in shown


def taught(notebook: nbformat.NotebookNode, found: Any) -> None:
    """What the notebook on SDFT and OPSD promises."""
    assert len(code_cells(notebook)) == 10
    scores, curves = found
    assert scores["student"]["new"] < 0.1 and scores["student"]["known"] > 0.9
    assert scores["teacher"]["new"] > 0.9
    for name in ("SDFT", "OPSD"):
        after = scores[f"student after {name}"]
        assert after["new"] > 0.5 and after["known"] > 0.5, scores
        assert sum(curves[name][-5:]) < 0.5 * sum(curves[name][:5]), name


def compared(notebook: nbformat.NotebookNode, found: Any) -> None:
    """What the notebook on a real model promises; here its model is the package's."""
    assert found == ["base", "sft", "sdft"]


# By a notebook's name: an expression of its kernel's, and what is asserted of its value.
CHECKS: dict[str, tuple[str, Callable[[nbformat.NotebookNode, Any], None]]] = {
    "sdft_and_opsd_in_ten_cells": ("[scores, curves]", taught),
    "sdft_on_a_real_model": ("[group.method for group in found]", compared),
}
# By the name of a notebook that takes long: what its cell of parameters ends with here.
SHORT = {
    "sdft_on_a_real_model": """
from tinsmith.demo import demo

SETUP = real.Setup(
    model="demo", folder=demo.MODEL, renderer=demo.RENDERER, per_skill=1, steps=1, batch=2, rank=2,
    max_tokens=4, rates={"sft": (1e-2,), "sdft": (1e-2,)},
)
SEEDS = 1
OUT = Path(__import__("tempfile").mkdtemp())
""",
}  # fmt: skip


def kinds(cells: list[nbformat.NotebookNode]) -> list[list[list[str]]]:
    """The kinds of each cell's outputs."""
    return [[sorted(one.get("data", [one.output_type])) for one in cell.outputs] for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    expression, check = CHECKS.get(path.stem, ("None", lambda notebook, found: None))
    asked = nbformat.v4.new_code_cell(f"import json; print(json.dumps({expression}))")
    run = nbformat.v4.new_notebook(cells=[*notebook.cells, asked], metadata=notebook.metadata)
    if path.stem in SHORT:
        run, stored = copy.deepcopy(run), kinds(code_cells(notebook))
        [cell] = [cell for cell in run.cells if "parameters" in cell.metadata.get("tags", ())]
        cell.source += SHORT[path.stem]
    NotebookClient(run, timeout=400, kernel_name="python3").execute()
    if path.stem in SHORT:
        assert kinds(code_cells(run)[:-1]) == stored, "it shows what it had shown, at full length"
    [output] = [item for item in run.cells[-1].outputs if item.get("name") == "stdout"]
    check(notebook, json.loads(output["text"]))


SETUP = f"""
import numpy as np, tinsmith
model = tinsmith.Model({str(MODEL)!r}, device="cpu", threads=1)
adapter = model.lora(rank=4, seed=1)
rows = [np.full(2000, 7, np.int32)] * 400
before = adapter.core.pending
"""


def test_a_kernels_interrupt_ends_a_step_and_leaves_the_adapter_as_it_was() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        assert client.execute_interactive(SETUP, timeout=60)["content"]["status"] == "ok"
        # What comes next is not part of the same run, so the error does not call it off.
        code = "adapter.forward_backward(rows, rows, progress=lambda *_: print('under way'))"
        message = client.execute(code, stop_on_error=False)
        while "under way" not in client.get_iopub_msg(timeout=60)["content"].get("text", ""):
            pass
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=60)
        assert reply["parent_header"]["msg_id"] == message
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        check = (
            "assert adapter.core.pending == before; adapter.forward_backward(rows[:1], rows[:1])"
        )
        reply = client.execute_interactive(check, timeout=60)["content"]
        assert reply["status"] == "ok", reply
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
