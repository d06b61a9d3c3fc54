"""Server-sent events, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rankmesh_gateway.http import sse as stream_module
from rankmesh_gateway.http.sse import stream
from rankmesh_gateway.state.event_log import KEPT_EVENTS, EventLog

pytestmark = pytest.mark.anyio


@pytest.fixture
def log(clock) -> EventLog:
    return EventLog(clock)


@pytest.fixture
def listen(log):
    """A function that begins to listen, and returns what gives the next piece."""

    def begin(position: int, overview: Callable[[], bytes] | None = None):
        pieces = stream(log, position, lambda: None, overview)

        async def piece() -> str:
            return (await asyncio.wait_for(anext(pieces), 20)).decode()

        return piece

    return begin


async def test_it_begins_with_a_place_to_come_back_to(log, listen):
    log.append("rank-left", "seen before")
    piece = listen(log.resume_position(None))
    assert await piece() == f"retry: 1000\nid: {log.last}\n\n"
    log.append("rank-left", "new")
    said = await piece()
    assert said.startswith(f"id: {log.last}\nevent: rank-left\ndata: {{")
    assert said.endswith("}\n\n")
    assert "new" in said


async def test_what_was_missed_comes_first_and_nothing_twice(log, listen):
    for number in range(5):
        log.append("rank-left", f"number {number}")
    second = log.since(log.resume_position(0))[1].id
    piece = listen(log.resume_position(second))
    await piece()
    said = await piece()
    assert [f"number {number}" in said for number in range(5)] == [False, False, True, True, True]
    log.append("rank-left", "number 5")
    said = await piece()
    assert said.count("id:") == 1
    assert "number 5" in said


async def test_an_event_from_another_thread_wakes_it(log, listen):
    piece = listen(log.resume_position(None))
    await piece()
    waiting = asyncio.ensure_future(piece())
    await asyncio.sleep(0.05)
    await asyncio.to_thread(log.append, "rank-left", "from a thread")
    assert "from a thread" in await waiting


async def test_text_that_has_line_breaks_stays_one_line(log, listen):
    log.append("rank-failed", "one\ntwo\r\nid: 7", job="a\nb")
    piece = listen(log.resume_position(0))
    await piece()
    assert len((await piece()).strip().split("\n")) == 3


async def test_overviews_come_without_an_id(log, listen, monkeypatch):
    monkeypatch.setattr(stream_module, "TICK_SECONDS", 0.02)
    piece = listen(log.resume_position(None), lambda: b"{}")
    await piece()
    for _ in range(3):
        assert await piece() == "event: overview\ndata: {}\n\n"


async def test_comments_while_nothing_happens(log, listen, monkeypatch):
    monkeypatch.setattr(stream_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(stream_module, "KEEP_ALIVE_SECONDS", 0.02)
    piece = listen(log.resume_position(None))
    await piece()
    assert (await piece()).startswith(":")
    assert (await piece()).startswith(":")


async def test_it_looks_for_silent_ranks(log):
    looked = 0

    def look() -> None:
        nonlocal looked
        looked += 1
        log.append("rank-suspect", "noticed by looking")

    pieces = stream(log, log.resume_position(None), look, None)
    await anext(pieces)
    assert b"noticed by looking" in await anext(pieces)
    assert looked == 1
    await pieces.aclose()


async def test_one_that_fell_behind_is_sent_away(log, listen):
    log.append("rank-left", "")
    piece = listen(log.resume_position(log.last))
    await piece()
    for _ in range(KEPT_EVENTS + 1):
        log.append("rank-left", "")
    with pytest.raises(StopAsyncIteration):
        await piece()
    assert log.listeners == 0


async def test_closing_ends_it(log, listen):
    piece = listen(log.resume_position(None))
    await piece()
    waiting = asyncio.ensure_future(piece())
    await asyncio.sleep(0.02)
    await asyncio.to_thread(log.close)
    with pytest.raises(StopAsyncIteration):
        await waiting
    assert log.listeners == 0
