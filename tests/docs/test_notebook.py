"""The notebook runs from its first cell to its last, and prints what is committed with it."""

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "what_is_kept.ipynb"


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1] / "src"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = printed_by(notebook)
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert printed_by(notebook) == committed, "run the notebook and commit its outputs"
    assert "default" in committed
    assert "value" in committed


def printed_by(notebook: Any) -> str:
    """The text that the cells printed, without pictures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)
