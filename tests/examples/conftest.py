"""The examples are programs: they are found by path, and run in an environment without a launcher's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import forked_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 360.0
FOREIGN = ("RANKMESH_", "MASTER_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "PYTHONUNBUFFERED")
"""Variables that a launcher sets, or that make the lines of several processes mix."""

DIGITS = """\
import numpy as np

def load_digits(return_X_y):
    with np.load({path!r}) as kept:
        return kept["images"], kept["labels"]
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run ``python ARGUMENTS`` in an empty folder and return how it ended."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # small matrices: more threads only wait for each other

    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return forked_python.run(command, cwd=tmp_path, env=environment | variables, text=True, timeout=DEADLINE)

    return run


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the examples' folder, from which modules can be imported during the test, as a program there could."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return EXAMPLES


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with scikit-learn's digits alone: its import takes each process seconds."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    images, labels = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", images=images, labels=labels)
    (folder / "sklearn").mkdir()
    (folder / "sklearn" / "__init__.py").touch()
    (folder / "sklearn" / "datasets.py").write_text(DIGITS.format(path=str(folder / "digits.npz")))
    return folder
