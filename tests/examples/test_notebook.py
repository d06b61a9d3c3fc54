"""The notebook runs from top to bottom, and its outputs are those that its text announces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")

pytestmark = pytest.mark.processes

SECONDS = 400


def outputs(notebook: Any, kind: str) -> list[str]:
    """Return the outputs of a media type, or the text of streams, in order."""
    found = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    if kind == "stream":
        return [each["text"] for each in found if each["output_type"] == "stream"]
    return [each["data"][kind] for each in found if kind in each.get("data", {})]


def test_it_runs(examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, the kernel does not show what other processes print
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, the lines of several processes mix
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(examples / "notebook.ipynb", as_version=4)
    written = nbformat.from_dict(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    for executed in (written, notebook):  # the outputs in the file, and those of today
        printed = "".join(outputs(executed, "stream"))
        assert "<ProcessGroup 'world', rank 0 of 4, shm, 10000 calls>" in printed
        assert "slope 3.00, intercept 1.00, after 10000 steps" in printed
        assert {f"rank {rank}: RankFailedError, failed ranks (2,)" for rank in (0, 1, 3)} <= set(printed.splitlines())
        assert "process 2 failed first: ValueError: this rank's data are damaged" in printed
        (table,) = outputs(executed, "text/html")
        assert table.count("<td>alive</td>") == 4
        assert " in world, shm" in table
        assert len(outputs(executed, "image/png")) == 1
