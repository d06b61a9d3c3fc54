"""A shared memory directory of the test's own, so that nothing other processes make there is taken for a leak."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import threads


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty directory in /dev/shm, which ``transport_named`` uses too."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rankmesh-tests-") as directory:
        monkeypatch.setattr(threads, "SHM", directory)
        yield Path(directory)
