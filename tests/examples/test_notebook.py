"""The notebook runs from top to bottom, and its outputs are those that its text announces."""

from __future__ import annotations

import re
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
        assert "slope 3.00, intercept 1.00, after 10000 steps\nequal at all ranks: True\n" in printed
        assert re.search(r"rank 2 \(pid \d+\) raised at In\[\d\]:5 in fail:\n", printed)
        assert '    raise ValueError("this rank\'s data are damaged")' in printed
        (table,) = outputs(executed, "text/html")
        assert len(re.findall(r"<td>all_reduce\(float64\[3\], SUM\) #1, In\[\d\]:6 in hang", table)) == 3
        assert re.search(r"rank 2 has not come to all_reduce #1 for .* s; it is at In\[\d\]:5 in hang", table)
        assert len(outputs(executed, "image/png")) == 1
