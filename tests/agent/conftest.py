"""What tests of several rooms of the agent need."""

from __future__ import annotations

import pytest

from rankmesh_agent.net.admission import ConnectionLimit


@pytest.fixture
def two_unauthenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each listener have two unauthenticated connections at a time."""
    monkeypatch.setattr(ConnectionLimit, "size", 2)
