"""What tests of several rooms of the agent need."""

from __future__ import annotations

import pytest

from rankmesh_agent.net.admission import ConnectionLimit
from rankmesh_agent.transports import shared_memory


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let no process reach another's descriptors, as in containers; return the paths that were tried."""
    tried: list[str] = []

    def refuse(path: str, file: str) -> int:
        tried.append(path)
        raise shared_memory.UnreachableHandleError

    monkeypatch.setattr(shared_memory, "_open_through_proc", refuse)
    return tried


@pytest.fixture
def two_unauthenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each listener have two unauthenticated connections at a time."""
    monkeypatch.setattr(ConnectionLimit, "size", 2)
