"""The store at another agent: what can go wrong on the way, and waits longer than one request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rankmesh_agent.store.client import RemoteStore
from rankmesh_agent.wire.errors import DistNetworkError, KeyNotFoundError, StoreTimeoutError

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def remote(url: str, token: str = "secret") -> AsyncIterator[RemoteStore]:
    store = RemoteStore(url, token)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def somebody_else(reply: bytes) -> AsyncIterator[str]:
    """A server that sends ``reply`` to whatever it is asked, then hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_nobody_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with remote(url) as store:
        for call in (store.get("k", 30.0), store.set("k", b""), store.add("k", 1), store.wait(["k"], 30.0)):
            with pytest.raises(DistNetworkError, match="owns the store, cannot be reached") as caught:
                await call
            assert caught.value.address == url
            assert caught.value.status == 502


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n<html",
        b'HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\n"no"',
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_somebody_else_at_the_address(reply):
    async with somebody_else(reply) as url, remote(url) as store:
        with pytest.raises(DistNetworkError, match=url):
            await store.get("k")


async def test_the_owner_refuses_our_token(owner):
    async with remote(owner, token="wrong") as store:
        with pytest.raises(DistNetworkError, match=r"answered 401: .*RANKMESH_TOKEN") as caught:
            await store.set("k", b"")
        assert caught.value.status == 502


async def test_proxies_of_the_environment_are_not_used(owner, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with remote(owner) as store:
        await store.set("k", b"v")
        assert await store.get("k") == b"v"


class TestLongWaits:
    @pytest.fixture(autouse=True)
    def short_polls(self, monkeypatch):
        monkeypatch.setattr("rankmesh_agent.store.client.LONG_POLL_SECONDS", 0.02)

    async def test_they_are_asked_for_again(self, owner, owned, monkeypatch):
        third = asyncio.Event()
        calls = itertools.count(1)
        watch = owned.table.watch
        loop = asyncio.get_running_loop()

        def counted(keys):
            if next(calls) == 3:
                loop.call_soon_threadsafe(third.set)
            return watch(keys)

        monkeypatch.setattr(owned.table, "watch", counted)
        async with remote(owner) as store:
            waiting = [asyncio.create_task(store.get("a", 30.0)), asyncio.create_task(store.wait(["a"], 30.0))]
            await third.wait()
            owned.table.set("a", b"v")
            assert await asyncio.wait_for(asyncio.gather(*waiting), 10.0) == [b"v", None]

    async def test_they_end(self, owner, owned):
        async with remote(owner) as store:
            with pytest.raises(KeyNotFoundError):
                await store.get("a", 0.1)
            with pytest.raises(StoreTimeoutError):
                await store.wait(["a"], 0.1)
        assert owned.table._watches == {}


async def test_waits_do_not_keep_out_who_sets(owner, owned):
    async with remote(owner) as store, asyncio.timeout(30.0):
        waiting = [asyncio.create_task(store.get("k", 30.0)) for _ in range(150)]
        while len(owned.table._watches.get("k", ())) < 150:
            await asyncio.sleep(0.005)
        await store.set("k", b"v")
        assert await asyncio.gather(*waiting) == [b"v"] * 150


async def test_after_closing_it_connects_anew(owner):
    async with remote(owner) as store:
        await store.set("k", b"v")
        await store.close()
        await store.close()
        assert await store.get("k") == b"v"
