"""Report on a rank: what the gateway, its agent and this host's kernel know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Snapshot = dict[str, Any]
"""The JSON of wire.snapshot.RankSnapshot."""


@dataclass
class RankReport:
    """A rank, as the gateway, its agent and this host's kernel report it.

    Attributes:
        job, epoch, rank, host, pid, url: the rank.
        state, reason, heartbeat_age: see RankInfo.
        snapshot: of the agent, None if it does not answer.
        error: the reason why it does not.
        process: state letter of the process, as in /proc/PID/stat: ``T`` stopped, ``R`` running; ``-`` if there is no
            such process; empty if it is on another host, or the agent answers.
    """

    job: str
    epoch: int
    rank: int
    host: str
    pid: int
    url: str
    state: str
    reason: str = ""
    heartbeat_age: float = 0.0
    snapshot: Snapshot | None = None
    error: str = ""
    process: str = ""
