"""Stores of jobs whose ranks have no core for seconds, as on a busy machine."""

from __future__ import annotations

from rankmesh_agent.store import base, client, replication


def allow_slow_ranks() -> None:
    """Let the store of this rank, which is about to join, wait longer for an owner or a replica that does not respond.

    A replica that is given up has no copy any more: where the owner ends then, the store is lost, and rightly so.
    """
    base.MARGIN_SECONDS = 6.0
    client.MARGIN_SECONDS = 6.0  # type: ignore[attr-defined]  # it imports the name
    replication.PATIENCE_SECONDS = 6.0
    replication._RESET_SECONDS = 5.0
