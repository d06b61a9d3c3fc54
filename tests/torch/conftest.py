"""The worlds in which gloo and rankmesh are compared, made once for all files."""

from __future__ import annotations

import os

import pytest
from support.cells import MISTAKES, RESULTS
from support.sides import Worlds


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # that of the run, which the workers share
    return Worlds(folder / "worlds", [*RESULTS, *MISTAKES], "both")
