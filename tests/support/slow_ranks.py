"""Stores of jobs whose ranks have no core for seconds, as on a busy machine."""

from __future__ import annotations

from rankmesh_agent.store import base, client


def allow_slow_ranks() -> None:
    """Let the store of this rank, which is about to join, wait longer for a gateway that does not respond."""
    base.MARGIN_SECONDS = 6.0
    client.MARGIN_SECONDS = 6.0  # type: ignore[attr-defined]  # it imports the name
