"""Tests under mpirun, which are skipped where there is none: unless RANKMESH_REQUIRE_MPI is set."""

from __future__ import annotations

import os

import pytest
from support.mpi import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = missing()
    if why and os.environ.get("RANKMESH_REQUIRE_MPI"):
        raise pytest.UsageError(f"RANKMESH_REQUIRE_MPI is set, but {why}")
    for item in items:
        if why and "/tests/mpi/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=why))
