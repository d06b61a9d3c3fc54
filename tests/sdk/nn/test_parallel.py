"""DistributedDataParallel's place: importing it costs nothing, and without torch it says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rankmesh.nn.parallel import DistributedDataParallel


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys; from rankmesh.nn.parallel import DistributedDataParallel; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_without_torch_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'rankmesh\[torch\]', or use rankmesh.nn.GradientBucketer"):
        DistributedDataParallel(object())
