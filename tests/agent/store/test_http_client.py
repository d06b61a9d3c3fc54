"""A remote store over HTTP: failures on the way, keys in paths, and waits longer than one request."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import free_port

from rankmesh_agent.net.sockets import url_of
from rankmesh_agent.store.base import BlockingStore
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import (
    Add,
    Append,
    Count,
    Delete,
    Get,
    Keys,
    MultiSet,
    QueuePop,
    QueuePush,
    Set,
    Wait,
)
from rankmesh_agent.store.condition import Condition, etag
from rankmesh_agent.store.http_client import BlockingHttpStore, HttpStore
from rankmesh_agent.wire.errors import (
    DistNetworkError,
    InvalidValueError,
    KeyNotFoundError,
    PreconditionFailedError,
    QueueEmptyError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES


@pytest.fixture(params=["async", "blocking"])
def remote(request, on_loop) -> Iterator[Callable[..., BlockingStore]]:
    """Opens remote stores, for callers with an event loop or without one."""
    with contextlib.ExitStack() as stack:

        def open_store(url: str, token: str = "secret") -> BlockingStore:
            blocking = request.param == "blocking"
            found = BlockingHttpStore(url, token) if blocking else on_loop(HttpStore(url, token))
            return stack.enter_context(contextlib.closing(found))

        yield open_store


@pytest.fixture
def store(remote, owner) -> BlockingStore:
    return remote(owner)


@contextlib.contextmanager
def another_server(reply: bytes) -> Iterator[str]:
    """A server that sends ``reply`` to any request, and ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock:
                        sock.recv(1 << 16)
                        sock.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield url_of(listener)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def unused_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


COMMANDS: tuple[Command, ...] = (
    *(Get("k", 30.0), Set("k", b""), Add("k"), Wait(("k",), 30.0)),
    *(Count(), Delete("k"), QueuePop("q", 30.0)),
)


@pytest.mark.parametrize("url", [unused_url, lambda: "http://[::1"], ids=["nobody listens", "invalid"])
def test_no_server_at_the_address(remote, url):
    address = url()
    store = remote(address)
    for command in COMMANDS:
        with pytest.raises(DistNetworkError, match=f"the store at {re.escape(address)} cannot be reached") as caught:
            store.execute(command)
        assert (caught.value.address, caught.value.status) == (address, 502)


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
def test_another_server_at_the_address(remote, reply):
    with another_server(reply) as url, pytest.raises(DistNetworkError, match=url) as caught:
        remote(url).execute(Add("k"))
    assert caught.value.address == url


def test_another_token(remote, owner):
    with pytest.raises(DistNetworkError, match=r"answered 401: .*RANKMESH_TOKEN") as caught:
        remote(owner, "wrong").execute(Set("k", b""))
    assert caught.value.status == 502


def test_a_body_over_the_owners_limit_is_not_sent(owner):
    with (
        contextlib.closing(BlockingHttpStore(owner, "secret")) as store,
        pytest.raises(InvalidValueError, match=str(MAX_BODY_BYTES)),
    ):
        store.execute(MultiSet((("k", bytes(50 << 20)),)))  # in base64 it is over the limit


def test_any_text_is_a_key(store, owned):
    keys = ["a/b", "/a", "a//b/", ".", "..", "../up", "add", "a?b#c", "100%", "%2F", "a b+c", "世界", "\x00\n", "a\nb"]
    for key in keys:
        store.execute(Set(key, b"v"))
        assert owned.table.keys() == [key]
        assert store.execute(Get(key)) == b"v"
        assert (store.execute(Keys(key)), store.execute(Count(key))) == ([key], 1)
        assert [store.execute(Delete(key)) for _ in range(2)] == [True, False]
        store.execute(Append(key, b"0"))
        store.execute(QueuePush(key, b"q"))
        assert owned.table.value(key) == b"0"
        assert owned.table.length(key) == 1
        store.execute(Delete(key))


def test_conditions(store):
    store.execute(Set("k", b"1", Condition(if_absent=True)))
    for condition in (Condition(if_absent=True), Condition((etag(b"2"),)), Condition(if_none_match=(etag(b"1"),))):
        for command in (Set("k", b"2", condition), Delete("k", condition)):
            with pytest.raises(PreconditionFailedError):
                store.execute(command)
    store.execute(Set("k", b"2", Condition((etag(b"0"), etag(b"1")))))
    assert store.execute(Delete("k", Condition(("*",)))) is True
    with pytest.raises(PreconditionFailedError, match="has no value"):
        store.execute(Delete("k", Condition(("*",))))


def test_no_proxies_of_the_environment_and_no_log(remote, owner, monkeypatch, caplog):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with caplog.at_level(logging.INFO):
        store = remote(owner)
        store.execute(Set("k", b"v"))
        assert store.execute(Get("k")) == b"v"
    assert "HTTP Request" not in caplog.text


class TestLostResponses:
    """The connection breaks before the response; test_server.py has the commands on values."""

    def test_queues(self, remote, losing):
        for number in range(3):
            with losing() as url:
                remote(url).execute(QueuePush("q", b"%d" % number))
        with losing() as url:
            assert [remote(url).execute(QueuePop("q")) for _ in range(3)] == [b"0", b"1", b"2"]

    def test_a_forwarding_agent_passes_the_idempotency_key_on(self, losing, on_loop):
        with losing(times=2) as url, contextlib.closing(on_loop(HttpStore(url, "secret"))) as forwarder:
            with pytest.raises(DistNetworkError):
                forwarder.execute(Add("k"), "name")
            assert forwarder.execute(Add("k"), "name") == 1


class TestLongWaits:
    @pytest.fixture(autouse=True)
    def short_polls(self, monkeypatch):
        monkeypatch.setattr("rankmesh_agent.store.http_client.LONG_POLL_SECONDS", 0.02)

    def test_they_are_requested_again(self, store, owned, monkeypatch):
        third, calls, watch = threading.Event(), itertools.count(1), owned.table.watch

        def counted(keys, pick):
            if next(calls) == 5:
                third.set()
            return watch(keys, pick)

        monkeypatch.setattr(owned.table, "watch", counted)
        commands = (Get("a", 30.0), Wait(("a",), 30.0), QueuePop("a", 30.0))
        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(store.execute, command) for command in commands]
            assert third.wait(30)
            Set("a", b"v").apply(owned.table)
            QueuePush("a", b"q").apply(owned.table)
            assert [each.result(10) for each in waiting] == [b"v", None, b"q"]

    @pytest.mark.parametrize(
        ("command", "error"),
        [
            (Get("a", 0.1), KeyNotFoundError),
            (Wait(("a",), 0.1), StoreTimeoutError),
            (QueuePop("a", 0.1), QueueEmptyError),
        ],
        ids=["get", "wait", "pop"],
    )
    def test_they_end(self, store, owned, command, error):
        with pytest.raises(error):
            store.execute(command)
        assert owned.table._watches == owned.table._pending_pops == {}


def test_after_closing_it_connects_again(owner, on_loop):
    with contextlib.closing(on_loop(HttpStore(owner, "secret"))) as store:
        store.execute(Set("k", b"v"))
        store.close_connections()
        store.close_connections()
        assert store.execute(Get("k")) == b"v"


@pytest.mark.parametrize("kind", [HttpStore, BlockingHttpStore])
def test_an_owner_that_does_not_respond(kind, on_loop):
    def respond_once() -> socket.socket:
        sock, _ = listener.accept()
        sock.recv(1 << 16)
        sock.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"value":1}')
        return sock

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(30.0)
        url = url_of(listener)
        store = kind(url)
        with contextlib.closing(on_loop(store) if kind is HttpStore else store) as calls:
            responding = threads.submit(respond_once)
            assert calls.execute(Add("k")) == 1  # to connect is not part of the time
            store.timeout = 0.2
            with (
                responding.result(30.0),
                pytest.raises(StoreUnresponsiveError, match=rf"{re.escape(url)} .* add within 0\.2 s\.") as caught,
            ):
                calls.execute(Add("k"))
        assert isinstance(caught.value, DistNetworkError)
        assert caught.value.address == url
