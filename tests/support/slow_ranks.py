"""Stores of jobs whose ranks have no core for seconds, as on a busy machine."""

from __future__ import annotations

from rankmesh_agent.store import store


def allow_slow_ranks() -> None:
    """Let the store of this rank, which is about to join, wait longer for a gateway that does not respond."""
    store.MARGIN_SECONDS = 6.0
