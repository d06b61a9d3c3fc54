"""The examples are programs: they are found by path, and run in an environment without a launcher's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 120.0
FOREIGN = ("RANKMESH_", "MASTER_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "PYTHONUNBUFFERED")
"""Variables that a launcher sets, or that make the lines of several processes mix."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run ``python ARGUMENTS`` in an empty folder and return how it ended."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
        )

    return run


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the examples' folder, from which modules can be imported during the test, as a program there could."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return EXAMPLES
