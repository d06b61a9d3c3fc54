"""Events as lines of the gateway's log."""

from __future__ import annotations

import logging
import time

from rankmesh_gateway.__main__ import log_events
from rankmesh_gateway.state.event_log import KEPT_EVENTS, EventLog


def test_lines(caplog):
    caplog.set_level(logging.INFO)
    events = EventLog(time.monotonic)
    position = events.last
    events.append("rank-joining", "rank 0 has joined: 1 of 2 ranks", job="j")
    events.append("world-complete", "the world of job 'j' is complete: 2 ranks", job="j")
    events.append("group-made", "group pair of ranks 0, 1 is made", job="j")
    events.append("rank-failed", "rank 0 has failed", job="j")
    events.append("agent-lost", "agent a has ended")
    position = log_events(events, position)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "job 'j': rank 0 has joined: 1 of 2 ranks"),
        ("INFO", "the world of job 'j' is complete: 2 ranks"),
        ("WARNING", "job 'j': rank 0 has failed"),
        ("WARNING", "agent a has ended"),
    ]
    caplog.clear()
    assert log_events(events, position) == position
    assert not caplog.records
    for _ in range(KEPT_EVENTS + 1):
        events.append("rank-left", "rank 0 has left")
    log_events(events, position)
    assert len(caplog.records) == KEPT_EVENTS + 1
    assert "the first of them are not logged" in caplog.records[0].message
