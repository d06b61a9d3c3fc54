"""The event log: ids, what is kept, and the listeners."""

from __future__ import annotations

import json
import re
import time
from typing import get_args

import pytest

from rankmesh_gateway import dashboard
from rankmesh_gateway.state import event_log as events_module
from rankmesh_gateway.state.event_log import KEPT_EVENTS, EventKind, EventLog, TooManyListenersError


@pytest.fixture
def log(clock) -> EventLog:
    return EventLog(clock)


def test_an_event_says_what_when_and_whom_it_concerns(log, clock):
    before = time.time()
    log.append("rank-suspect", "rank 2 is silent", at=clock.now - 2.0, job="j", ranks=[2], group="g", epoch=3)
    (event,) = log.since(log.resume_position(0))
    fields = json.loads(event.data)
    assert before - 2.0 <= fields.pop("time") <= time.time() - 2.0
    assert event.kind == "rank-suspect"
    assert fields == {"job": "j", "ranks": [2], "group": "g", "detail": "rank 2 is silent", "epoch": 3}


def test_ids_grow_by_one_and_are_exact_in_javascript(log):
    for _ in range(3):
        log.append("rank-left", "")
    first, second, third = (event.id for event in log.since(log.resume_position(0)))
    assert (second - first, third - first) == (1, 2)
    assert third < 1 << 53


def test_what_is_behind_a_position(log):
    start = log.resume_position(None)
    assert log.since(start) == []
    for number in range(4):
        log.append("rank-left", str(number))
    seen = log.since(start)[1]
    assert [json.loads(event.data)["detail"] for event in log.since(log.resume_position(seen.id))] == ["2", "3"]
    assert log.since(log.resume_position(log.last)) == []


def test_an_id_of_another_process_stands_for_all_that_is_kept(clock):
    earlier = EventLog(clock)
    earlier.append("rank-left", "")
    time.sleep(0.001)
    log = EventLog(clock)
    log.append("rank-left", "")
    for seen in (0, earlier.last, log.last + 1, 1 << 62):
        assert len(log.since(log.resume_position(seen))) == 1


def test_only_so_many_are_kept(log):
    start = log.resume_position(None)
    for _ in range(KEPT_EVENTS + 5):
        log.append("rank-left", "")
    assert len(log.since(start)) == KEPT_EVENTS
    assert not log.has_dropped(log.resume_position(0)), "who asks for all that is kept misses nothing"
    assert log.has_dropped(start + 1)
    assert log.has_dropped(start + 4)
    assert not log.has_dropped(start + 5), "it saw the last one that is kept no more"


def test_listeners_are_told_and_are_only_so_many(log, monkeypatch):
    monkeypatch.setattr(events_module, "MAX_LISTENERS", 2)
    woken: list[str] = []
    with log.subscribe(lambda: woken.append("a")), log.subscribe(lambda: woken.append("b")):
        log.append("rank-left", "")
        assert woken == ["a", "b"]
        assert log.listeners == 2
        with pytest.raises(TooManyListenersError, match="2 clients"), log.subscribe(lambda: None):
            pass
    log.append("rank-left", "")
    assert woken == ["a", "b"]


def test_the_dashboard_knows_all_kinds():
    script = dashboard.file("marks.js").body.decode()
    table = script.partition("EVENTS = {")[2].partition("};")[0]
    assert {*re.findall(r'"([a-z-]+)":', table)} == {*get_args(EventKind)}
