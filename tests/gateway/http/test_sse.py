"""Server-sent events, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rankmesh_gateway.http.routes import events
from rankmesh_gateway.http.routes.events import stream
from rankmesh_gateway.state.event_log import KEPT_EVENTS, EventLog

pytestmark = pytest.mark.anyio


@pytest.fixture
def log(clock) -> EventLog:
    return EventLog(clock)


async def piece_of(pieces: AsyncIterator[bytes]) -> str:
    return (await asyncio.wait_for(anext(pieces), 20)).decode()


async def test_the_first_piece_has_a_position_to_resume_from(log):
    log.append("rank-left", "before")
    pieces = stream(log, log.last, lambda: None, None)
    assert await piece_of(pieces) == f"retry: 1000\nid: {log.last}\n\n"
    log.append("rank-left", "new\ntwo\r\nid: 7", job="a\nb")
    event = await piece_of(pieces)
    assert event.startswith(f"id: {log.last}\nevent: rank-left\ndata: {{")
    assert event.endswith("}\n\n")
    assert "new" in event
    assert len(event.strip().split("\n")) == 3, "text with line breaks stays one line"


async def test_snapshots_come_without_an_id_and_comments_while_nothing_happens(log, monkeypatch):
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.02)
    with_snapshots = stream(log, log.last, lambda: None, lambda: b"{}")
    without = stream(log, log.last, lambda: None, None)
    for pieces in (with_snapshots, without):
        await piece_of(pieces)
    for _ in range(3):
        assert await piece_of(with_snapshots) == "event: overview\ndata: {}\n\n"
        assert (await piece_of(without)).startswith(":")


async def test_it_looks_for_silent_ranks(log):
    looked = 0

    def look() -> None:
        nonlocal looked
        looked += 1
        log.append("rank-suspect", "noticed by looking")

    pieces = stream(log, log.last, look, None)
    await anext(pieces)
    assert b"noticed by looking" in await anext(pieces)
    assert looked == 1
    await pieces.aclose()


async def test_a_listener_that_fell_behind_is_disconnected(log):
    log.append("rank-left", "")
    pieces = stream(log, log.last, lambda: None, None)
    await anext(pieces)
    for _ in range(KEPT_EVENTS + 1):
        log.append("rank-left", "")
    with pytest.raises(StopAsyncIteration):
        await piece_of(pieces)
    assert log.listeners == 0


async def test_the_last_round_has_what_happened_before_the_end(log):
    pieces = stream(log, log.last, lambda: None, lambda: b"{}")
    for _ in range(2):
        await anext(pieces)
    log.append("rank-left", "just now")
    log.close()
    rest = [piece.decode() async for piece in pieces]
    assert "just now" in rest[0]
    assert rest[1] == "event: overview\ndata: {}\n\n"
    assert rest[2:] == ["event: gateway-ended\ndata: {}\n\n"]
