"""Events of a gateway as lines of its log."""

from __future__ import annotations

import json
import logging

from rankmesh_gateway.state.event_log import EventKind, EventLog

_log = logging.getLogger("rankmesh.gateway")

_WARNINGS: frozenset[EventKind] = frozenset({"rank-suspect", "rank-failed", "group-failed", "agent-lost"})
_LEFT_OUT: frozenset[EventKind] = frozenset({"group-made", "group-ended"})
"""A program may make any number of groups; rank-left is the end of a job."""


def log_events(events: EventLog, position: int) -> int:
    """Log the events behind a position; return the position behind them."""
    if events.has_dropped(position):
        _log.warning("more events have happened than are kept: the first of them are not logged")
    for event in events.since(position):
        position = event.id
        if event.kind not in _LEFT_OUT:
            data = json.loads(event.data)
            job, detail = f"job {data['job']!r}", data["detail"]
            named = not data["job"] or job in detail
            level = logging.WARNING if event.kind in _WARNINGS else logging.INFO
            _log.log(level, "%s", detail if named else f"{job}: {detail}")
    return position
