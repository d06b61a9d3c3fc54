"""A remote store over HTTP: failures on the way, keys in paths, and waits longer than one request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from support.processes import free_port

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import (
    Add,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    Keys,
    MultiSet,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    Wait,
)
from rankmesh_agent.store.condition import Condition, etag
from rankmesh_agent.store.http_client import HttpStore
from rankmesh_agent.wire.errors import (
    DistNetworkError,
    InvalidValueError,
    KeyNotFoundError,
    PreconditionFailedError,
    QueueEmptyError,
    StoreTimeoutError,
)
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def remote(url: str, token: str = "secret") -> AsyncIterator[HttpStore]:
    store = HttpStore(url, token)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def serving(answer, port: int = 0) -> AsyncIterator[str]:
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def another_server(reply: bytes) -> AsyncIterator[str]:
    """A server that sends ``reply`` to whatever it is asked, then hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
        writer.close()

    async with serving(answer) as url:
        yield url


@asynccontextmanager
async def losing_answers(owner: str, count: int, port: int = 0) -> AsyncIterator[str]:
    """The URL of a proxy that passes everything on to the owner, but hangs up instead of its first answers."""
    target = urlsplit(owner)
    lost = itertools.count(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_owner, to_owner = await asyncio.open_connection(target.hostname, target.port)

        async def pass_on(source, sink, *, lose: bool) -> None:
            try:
                while data := await source.read(1 << 16):
                    if lose and next(lost) <= count:
                        break
                    sink.write(data)
            finally:  # cancelled too, when the test's loop ends
                sink.close()

        await asyncio.gather(pass_on(reader, to_owner, lose=False), pass_on(from_owner, writer, lose=True))

    async with serving(serve, port) as url:
        yield url


def unused_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def test_no_server_at_the_address():
    url = unused_url()
    commands: tuple[Command, ...] = (Get("k", 30.0), Set("k", b""), Add("k"), Wait(("k",), 30.0), Count(), Delete("k"))
    async with remote(url) as store:
        for command in commands:
            with pytest.raises(DistNetworkError, match=f"the store at {url} cannot be reached") as caught:
                await store.execute(command)
            assert caught.value.address == url
            assert caught.value.status == 502


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<html",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n<html",
        b'HTTP/1.1 404 Not Found\r\nContent-Length: 25\r\n\r\n{"code":[],"detail":null}',
        b'HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\n"no"',
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_another_server_at_the_address(reply):
    async with another_server(reply) as url, remote(url) as store:
        with pytest.raises(DistNetworkError, match=url) as caught:
            await store.execute(Add("k"))
        assert caught.value.address == url


async def test_an_invalid_url():
    async with remote("http://[::1") as store:
        with pytest.raises(DistNetworkError, match="cannot be reached"):
            await store.execute(Get("k"))


async def test_another_token(owner):
    async with remote(owner, token="wrong") as store:
        with pytest.raises(DistNetworkError, match=r"answered 401: .*RANKMESH_TOKEN") as caught:
            await store.execute(Set("k", b""))
        assert caught.value.status == 502


async def test_a_body_over_the_owners_limit_is_not_sent(owner):
    async with remote(owner) as store:
        with pytest.raises(InvalidValueError, match=str(MAX_BODY_BYTES)):
            await store.execute(MultiSet((("k", bytes(50 << 20)),)))  # in base64 it is over the limit


@pytest.mark.parametrize(
    "key",
    ["a/b", "/a", "a//b/", ".", "..", "../up", "add", "a?b#c", "100%", "%2F", "a b+c", "grüße/世界", "\x00\n", "a\nb"],
)
async def test_any_text_is_a_key(owner, owned, key):
    async with remote(owner) as store:
        await store.execute(Set(key, b"v"))
        assert owned.table.keys() == [key]
        assert await store.execute(Get(key)) == b"v"
        assert (await store.execute(Keys(key)), await store.execute(Count(key))) == ([key], 1)
        assert [await store.execute(Delete(key)) for _ in range(2)] == [True, False]
        await store.execute(Append(key, b"0"))
        await store.execute(QueuePush(key, b"q"))
        assert owned.table.value(key) == b"0"
        assert owned.table.length(key) == 1


async def test_conditions(owner, owned):
    async with remote(owner) as store:
        await store.execute(Set("k", b"1", Condition(if_absent=True)))
        for condition in (Condition(if_absent=True), Condition((etag(b"2"),)), Condition(if_none_match=(etag(b"1"),))):
            for command in (Set("k", b"2", condition), Delete("k", condition)):
                with pytest.raises(PreconditionFailedError):
                    await store.execute(command)
        await store.execute(Set("k", b"2", Condition((etag(b"0"), etag(b"1")))))
        assert await store.execute(Delete("k", Condition(("*",)))) is True
        with pytest.raises(PreconditionFailedError, match="has no value"):
            await store.execute(Delete("k", Condition(("*",))))


async def test_proxies_of_the_environment_are_not_used(owner, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with remote(owner) as store:
        await store.execute(Set("k", b"v"))
        assert await store.execute(Get("k")) == b"v"


async def test_requests_are_not_logged(owner, caplog):
    with caplog.at_level(logging.INFO):
        async with remote(owner) as store:
            await store.execute(Set("k", b"v"))
    assert "HTTP Request" not in caplog.text


class TestLostResponses:
    """The connection breaks before the response: the client repeats the request, and the owner does not execute it."""

    @pytest.mark.parametrize(
        ("command", "result", "end"),
        [
            (Add("k"), 2, b"2"),
            (Append("k", b"0"), None, b"10"),
            (CompareSet("k", b"1", b"2"), b"2", b"2"),
            (Delete("k"), True, None),
            (Set("k", b"2"), None, b"2"),
            (Get("k"), b"1", b"1"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Command) else "",
    )
    async def test_values(self, owner, owned, command, result, end):
        Set("k", b"1").apply(owned.table)
        async with losing_answers(owner, 1) as url, remote(url) as store:
            assert await store.execute(command) == result
        assert owned.table.change(lambda values: (values.get("k"), {})) == end

    async def test_queues(self, owner, owned):
        for number in range(3):
            async with losing_answers(owner, 1) as url, remote(url) as store:
                await store.execute(QueuePush("q", b"%d" % number))
        async with losing_answers(owner, 1) as url, remote(url) as store:
            assert await store.execute(QueuePop("q")) == b"0"
            assert await store.execute(QueueLen("q")) == 2

    async def test_a_forwarding_agent_passes_the_idempotency_key_on(self, owner, owned):
        async with losing_answers(owner, 2) as url, remote(url) as forwarder:
            with pytest.raises(DistNetworkError):
                await forwarder.execute(Add("k"), "name")
            assert await forwarder.execute(Add("k"), "name") == 1

    async def test_twice_in_a_row_is_too_much(self, owner, owned):
        async with losing_answers(owner, 2) as url, remote(url) as store:
            with pytest.raises(DistNetworkError, match="cannot be reached"):
                await store.execute(Add("k"))
        assert owned.table.change(lambda values: (values["k"], {})) == b"1"


class TestLongWaits:
    @pytest.fixture(autouse=True)
    def short_polls(self, monkeypatch):
        monkeypatch.setattr("rankmesh_agent.store.http_client.LONG_POLL_SECONDS", 0.02)

    async def test_they_are_asked_for_again(self, owner, owned, monkeypatch):
        third = asyncio.Event()
        calls = itertools.count(1)
        watch = owned.table.watch
        loop = asyncio.get_running_loop()

        def counted(keys, pick):
            if next(calls) == 3:
                loop.call_soon_threadsafe(third.set)
            return watch(keys, pick)

        monkeypatch.setattr(owned.table, "watch", counted)
        async with remote(owner) as store:
            commands = (Get("a", 30.0), Wait(("a",), 30.0), QueuePop("a", 30.0))
            waiting = [asyncio.create_task(store.execute(command)) for command in commands]
            await third.wait()
            Set("a", b"v").apply(owned.table)
            QueuePush("a", b"q").apply(owned.table)
            assert await asyncio.wait_for(asyncio.gather(*waiting), 10.0) == [b"v", None, b"q"]

    async def test_they_end(self, owner, owned):
        async with remote(owner) as store:
            for command, error in (
                (Get("a", 0.1), KeyNotFoundError),
                (Wait(("a",), 0.1), StoreTimeoutError),
                (QueuePop("a", 0.1), QueueEmptyError),
            ):
                with pytest.raises(error):
                    await store.execute(command)
        assert owned.table._watches == {}
        assert owned.table._pending_pops == {}


async def test_after_closing_it_connects_again(owner):
    async with remote(owner) as store:
        await store.execute(Set("k", b"v"))
        await store.close()
        await store.close()
        assert await store.execute(Get("k")) == b"v"


class TestAnOwnerThatStartsLater:
    async def test_the_client_waits_for_it(self, owner, owned, monkeypatch):
        late = unused_url()
        store = StoreClient(late, "secret")
        asked = asyncio.create_task(asyncio.to_thread(store.execute_first, Add("k"), Deadline(30.0)))
        await asyncio.sleep(0.1)  # long enough to be refused at least once
        async with losing_answers(owner, 0, urlsplit(late).port):
            assert await asked == 1
            store.close()

    async def test_until_the_deadline(self):
        url = unused_url()
        store = StoreClient(url)
        with pytest.raises(
            DistNetworkError, match=rf"waited 0\.1 s for a store at {url}: .*refused.*is_master"
        ) as caught:
            store.execute_first(Count(), Deadline(0.1))
        assert caught.value.address == url
        store.close()

    async def test_but_not_for_another_server(self):
        async with another_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi") as url, asyncio.timeout(30.0):
            store = StoreClient(url)
            with pytest.raises(DistNetworkError, match="is not a RankMesh store"):
                await asyncio.to_thread(store.execute_first, Count(), Deadline(60.0))
            store.close()
