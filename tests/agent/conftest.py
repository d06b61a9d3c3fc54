"""What tests of several rooms of the agent need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import threads

from rankmesh_agent.net.admission import ConnectionLimit


@pytest.fixture
def two_unauthenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each listener have two unauthenticated connections at a time."""
    monkeypatch.setattr(ConnectionLimit, "size", 2)


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty directory in /dev/shm, which ``transport_named`` uses too: all that is there is the test's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rankmesh-tests-") as directory:
        monkeypatch.setattr(threads, "SHM", directory)
        yield Path(directory)
