"""The notebook of the ladder runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import pytest

from docs.site.recording import ROOT

jupytext = pytest.importorskip("jupytext", reason="needs what `make docs` installs")
nbclient = pytest.importorskip("nbclient", reason="needs what `make docs` installs")
NOTEBOOK = ROOT / "docs" / "ladder_notebook.md"


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    notebook = jupytext.read(NOTEBOOK)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [
        "".join(str(out.get("text") or out.get("data")) for out in cell.get("outputs", ()))
        for cell in notebook.cells
    ]
    assert any("[3.0, 3.0]" in output for output in outputs)
    assert any("naive       messages: 6, in backward: 0" in output for output in outputs), outputs
    assert any("ValueError: rank 1 has no data" in output for output in outputs)
    assert any("--- rank 0: " in output for output in outputs)
    # The page's heading depends on the times measured, its key does not.
    assert any("srcdoc" in output and "blocked in communication" in output for output in outputs)


def test_the_file_for_services_has_the_same_cells() -> None:
    text, file = jupytext.read(NOTEBOOK), jupytext.read(NOTEBOOK.with_suffix(".ipynb"))
    cells = [[(cell.cell_type, cell.source) for cell in one.cells] for one in (text, file)]
    assert cells[0] == cells[1], f"run jupytext --to ipynb {NOTEBOOK}"
