"""torch's TCPStore protocol at a gateway's port, by clients without torch."""

from __future__ import annotations

import logging
import os
import socket
import struct
import urllib.request
from collections.abc import Iterator

import pytest
from support.processes import wait_until
from support.torch_port import CANCELED, NOT_READY, READY, SECONDS, STOPPED, Client, Served, served

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net import peer_credentials
from rankmesh_gateway import torch_store

PONG = struct.pack("<I", 1234)


@pytest.fixture
def at() -> Iterator[Served]:
    with served() as gateway:
        yield gateway


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log; a warning that is given once a minute is due."""
    monkeypatch.setattr(peer_credentials._warning, "_next", 0.0)
    caplog.set_level(logging.WARNING)
    return caplog


def test_each_command(at: Served) -> None:
    with Client(at.port) as client:
        assert client.ping() == PONG
        client.send("set", "k", b"\0\xff")
        assert client.value("get", "k") == b"\0\xff"
        assert client.value("get", "missing") == b""
        assert client.value("compare_set", "c", "", "1") == b"1"
        assert client.value("compare_set", "c", "x", "2") == b"1"
        assert client.value("compare_set", "c", "1", "2") == b"2"
        assert (client.number("add", "n", 5), client.number("add", "n", -7)) == (5, -2)
        assert client.byte("check", ["k", "n"]) == READY
        assert client.byte("check", ["k", "missing"]) == NOT_READY
        assert client.byte("wait", ["k", "n"]) == STOPPED
        assert client.byte("cancel_wait") == CANCELED
        client.send("append", "k", "more")
        client.send("multi_set", [("a", "1"), (b"\xff\x00", "2")])
        client.send("multi_get", ["a", "k", b"\xff\x00"])
        assert [client.value() for _ in range(3)] == [b"1", b"\0\xffmore", b"2"]
        assert client.number("num_keys") == 5
        assert client.number("list_keys") == 5
        assert sorted(client.value() for _ in range(5)) == [b"a", b"c", b"k", b"n", b"\xff\x00"]
        assert (client.number("delete", "a"), client.number("delete", "a")) == (1, 0)
        client.send("push", "q", "first")
        client.send("push", "q", "second")
        assert (client.number("length", "q"), client.number("pop", "q"), client.value()) == (2, 2, b"first")
        assert (client.number("pop", "q"), client.value(), client.number("pop", "q")) == (1, b"second", 0)
        assert client.byte("barrier", "b", 1) == STOPPED
    assert urllib.request.urlopen(f"{at.server.url()}/livez", timeout=SECONDS).status == 200, "HTTP as before"


def test_bytes_that_come_one_by_one(at: Served) -> None:
    with socket.create_connection(("127.0.0.1", at.port), SECONDS) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in torch_store.PREFACE + b"\x0d\1\2\3\4":
            sock.sendall(bytes([byte]))
        assert sock.recv(4) == b"\1\2\3\4"


class TestWaits:
    def test_it_ends_with_the_last_key_whatever_sets_it(self, at):
        setters = {
            "set": ("k", "v"),
            "append": ("k", "v"),
            "multi_set": ([("k", "v")],),
            "push": ("k", "v"),
            "add": ("k", 1),
            "compare_set": ("k", "", "v"),
            "barrier": ("k", 1),
        }
        for name, arguments in setters.items():
            with Client(at.port) as waiter, Client(at.port) as setter:
                waiter.send("wait", ["k", "last"])
                assert waiter.ping() == PONG, "the wait has begun"
                setter.send("set", "last", "")
                assert setter.number("num_keys")
                assert waiter.ping() == PONG, "the wait goes on"
                setter.send(name, *arguments)
                assert waiter.read(1) == STOPPED, name
                setter.number("delete", "k")
                setter.number("pop", "k")
                setter.number("delete", "last")

    def test_a_pushed_value_ends_the_longest_wait_alone(self, at):
        with Client(at.port) as first, Client(at.port) as second, Client(at.port) as pusher:
            for client in (first, second):
                client.send("wait", ["q"])
                client.ping()
            pusher.send("push", "q", "1")
            assert first.read(1) == STOPPED
            assert (second.byte("cancel_wait"), first.number("pop", "q"), first.value()) == (CANCELED, 1, b"1")

    def test_a_barrier_ends_with_its_last_client(self, at):
        with Client(at.port) as first, Client(at.port) as second:
            first.send("barrier", "b", 2)
            first.ping()
            assert second.byte("barrier", "b", 2) == STOPPED
            assert first.read(1) == STOPPED

    def test_one_that_is_canceled_or_whose_client_has_gone_leaves_nothing(self, at):
        with Client(at.port) as canceled, Client(at.port) as gone:
            for client in (canceled, gone):
                client.send("wait", ["a", "b"])
                client.ping()
            assert canceled.byte("cancel_wait") == CANCELED
        wait_until(lambda: not at.store._clients, "the connections have ended")
        assert not at.store.waiting


def test_clear_removes_all_keys_and_ends_all_connections(at: Served) -> None:
    with Client(at.port) as old:
        old.send("set", "k", "v")
        old.send("wait", ["other"])
        old.ping()
        at.store.clear()
        with Client(at.port) as new:
            assert new.number("num_keys") == 0
        assert old.read(1) == b""


class TestLimits:
    def ends(self, port: int, *sent: bytes) -> bool:
        """Return whether the server ends a connection that sends these bytes."""
        with Client(port) as client:
            client.sock.sendall(b"".join(sent))
            return client.read(1) == b""

    @pytest.mark.parametrize(
        "sent",
        [
            b"\0" + bytes(4),
            bytes([99]),
            b"\1" + struct.pack("<Q", 1 << 62),
            b"\1" + struct.pack("<QcQ", 1, b"k", 1 << 40),
            *(bytes([command]) + struct.pack("<Q", 1 << 32) for command in (5, 6, 10, 11)),
            b"\4" + struct.pack("<Q", 1) + b"t" + struct.pack("<q", 1),
        ],
        ids=["validate again", "unknown", "key", "value", "check", "wait", "multi_get", "multi_set", "add to text"],
    )
    def test_an_invalid_command_ends_its_connection_alone(self, at, sent):
        with Client(at.port) as other:
            other.send("set", "t", "text")
            assert other.number("num_keys") == 1
            assert self.ends(at.port, sent)
            assert other.value("get", "t") == b"text"

    def test_a_store_that_is_full(self, log):
        with served(Settings(store_keys=2, store_bytes=100)) as at, Client(at.port) as client:
            client.send("set", "k", "v")
            client.send("set", "large", bytes(100))
            assert client.read(1) == b""
        assert "RANKMESH_STORE_BYTES" in log.text

    def test_clients_have_half_of_the_descriptors(self, log, monkeypatch):
        monkeypatch.setattr(torch_store.resource, "getrlimit", lambda _: (4, 4))
        with served() as at, Client(at.port) as one, Client(at.port) as two:
            assert one.number("num_keys") == two.number("num_keys") == 0
            with Client(at.port) as third:
                assert third.ping()
                third.send("num_keys")
                assert third.read(1) == b""
        assert "raise the limit (ulimit -n)" in log.text

    def test_a_client_that_stops_in_a_command_or_reads_nothing(self, at, monkeypatch):
        with Client(at.port) as idle, Client(at.port) as sender, Client(at.port) as reader:
            reader.send("set", "k", bytes(20 << 20))
            assert reader.number("num_keys") == idle.number("num_keys") == 1
            monkeypatch.setattr(torch_store, "STEP_SECONDS", 0.2)
            sender.sock.sendall(b"\1" + struct.pack("<Q", 5) + b"ab")
            assert sender.read(1) == b""
            reader.send("multi_get", ["k"] * 10)
            wait_until(lambda: len(at.store._clients) == 1, "the connection of a client that reads nothing has ended")
            assert idle.number("num_keys") == 1


def test_no_descriptor_is_left(at: Served) -> None:
    with Client(at.port) as client:
        client.number("num_keys")
    wait_until(lambda: not at.store._clients, "the connection has ended")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with Client(at.port) as client:
            client.send("wait", ["k"])
            client.ping()
    wait_until(lambda: not at.store._clients, "the connections have ended")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "their descriptors are closed")
