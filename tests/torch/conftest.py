"""The worlds in which gloo and rankmesh are compared, made once for results and errors."""

from __future__ import annotations

import pytest
from support.cells import MISTAKES, RESULTS
from support.sides import Worlds


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"), [*RESULTS, *MISTAKES])
