"""TCPStore: master, clients, shared servers, sockets, and failures."""

from __future__ import annotations

import gc
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
from support.processes import free_port, plain_http_server, wait_until

import rankmesh as dist

SHORT = timedelta(seconds=0.2)


@pytest.fixture
def made() -> Iterator[Callable[..., dist.TCPStore]]:
    """Makes stores on loopback, and closes them."""
    stores = []

    def make(port: int = 0, *arguments, **options) -> dist.TCPStore:
        stores.append(dist.TCPStore("127.0.0.1", port, *arguments, **options))
        return stores[-1]

    yield make
    for store in reversed(stores):
        store.close()


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future]]:
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


@pytest.fixture(autouse=True)
def everything_is_closed() -> Iterator[None]:
    gc.collect()
    before = resources()
    yield
    gc.collect()
    wait_until(lambda: no_more_than(before), f"what was opened to be closed: {before}, {resources()}", 10)


def resources() -> tuple[set[threading.Thread], int]:
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("rankmesh")}
    return threads, len(os.listdir("/proc/self/fd"))


def no_more_than(before: tuple[set[threading.Thread], int]) -> bool:
    threads, descriptors = resources()
    return threads <= before[0] and descriptors <= before[1]


def test_attributes(made):
    master = made(is_master=True)
    client = dist.TCPStore("localhost", master.port)
    assert (master.host, 0 < master.port < 65536) == ("127.0.0.1", True)
    assert (client.host, client.port) == ("localhost", master.port)
    assert master.timeout == client.timeout == timedelta(seconds=300)
    assert repr(client) == f"TCPStore('localhost', {master.port})"
    client.set("k", "v")
    assert master.get("k") == b"v"
    client.close()


def test_participants_are_counted_with_a_world_size(made, in_thread):
    port = free_port()
    master = in_thread(made, port, 3, True)
    clients = [made(port, 3) for _ in range(2)]
    for store in (master.result(30), *clients):
        assert (store.num_keys(), store.list_keys()) == (1, [])


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": None},
        {"world_size": -1},
        {"world_size": 2, "wait_for_workers": False},
        {"world_size": 2, "wait_for_worker": False},
    ],
)
def test_they_are_not_counted_otherwise(made, options):
    master = made(is_master=True, **options)
    assert master.num_keys() == made(master.port, **options).num_keys() == 0


def test_a_client_waits_for_its_master(made, in_thread):
    port = free_port()
    client = in_thread(made, port, timeout=timedelta(seconds=30))
    time.sleep(0.1)  # long enough to be refused
    made(port, is_master=True).set("k", "v")
    assert client.result(30).get("k") == b"v"


class TestSharedServers:
    def test_masters_at_one_address_have_the_same_keys(self, made):
        first = made(world_size=1, is_master=True, multi_tenant=True)
        second = made(first.port, 1, True, multi_tenant=True)
        first.set("k", "v")
        assert (second.get("k"), second.num_keys()) == (b"v", 2)
        first.close()
        assert second.get("k") == made(first.port).get("k") == b"v"
        second.close()
        again = made(first.port, is_master=True, multi_tenant=True)  # the last one ended the service
        assert not again.check(["k"])

    def test_a_clone_keeps_its_master_alive(self, made):
        first = made(is_master=True)
        clone = first.clone()
        first.set("k", "v")
        first.close()
        assert clone.get("k") == made(clone.port).get("k") == b"v"
        clone.close()
        with pytest.raises(dist.DistNetworkError):
            made(first.port, timeout=SHORT)


class TestGivenSockets:
    @pytest.mark.parametrize("listens", [True, False])
    def test_one_is_adopted(self, made, listens):
        bound = socket.create_server(("127.0.0.1", 0)) if listens else socket.socket()
        if not listens:
            bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        master = made(port if listens else 0, is_master=True, master_listen_fd=bound.detach())
        assert master.port == port
        made(port).set("k", "v")
        assert master.get("k") == b"v"

    def test_one_at_another_port(self, made):
        with socket.create_server(("127.0.0.1", 0)) as bound:
            there = bound.getsockname()[1]
            with pytest.raises(dist.DistStoreError, match=f"bound to port {there}, but port={there - 1}"):
                made(there - 1, is_master=True, master_listen_fd=bound.fileno())
            assert bound.getsockname()[1] == there  # it is still open
        with socket.socket() as unbound, pytest.raises(dist.DistStoreError, match="bound to port 0"):
            made(0, is_master=True, master_listen_fd=unbound.fileno())

    def test_other_descriptors(self, made):
        with open(os.devnull) as file, socket.socket(socket.AF_UNIX) as local:
            for descriptor, what in ((file.fileno(), "a socket"), (999, "a socket"), (local.fileno(), "a TCP socket")):
                with pytest.raises(dist.DistNetworkError, match=f"master_listen_fd={descriptor} is not {what}"):
                    made(0, is_master=True, master_listen_fd=descriptor)


class TestFailures:
    """Nothing is left behind; see everything_is_closed."""

    def test_no_master(self, made):
        port = free_port()
        message = rf"waited 0\.2 s for a store at http://127\.0\.0\.1:{port}: .*refused.*is_master"
        with pytest.raises(dist.DistNetworkError, match=message) as caught:
            made(port, 2, timeout=SHORT)
        assert caught.value.address == f"http://127.0.0.1:{port}"
        with pytest.raises(dist.DistNetworkError, match=r"http://no\.such\.host\.invalid:29500"):
            dist.TCPStore("no.such.host.invalid", 29500, timeout=SHORT)

    def test_too_few_participants(self, made):
        with pytest.raises(
            dist.errors.StoreTimeoutError, match=r"waited 0\.2 s for 2 participants, and 1 came"
        ) as caught:
            made(0, 2, True, timeout=SHORT)
        assert isinstance(caught.value, TimeoutError)

    def test_the_port_is_taken(self, made):
        with socket.create_server(("127.0.0.1", 0)) as other:
            for port in (other.getsockname()[1], made(is_master=True).port):  # a shared server needs both to share it
                message = rf"127\.0\.0\.1:{port} is in use by .*pid {os.getpid()}"
                with pytest.raises(dist.errors.AddressInUseError, match=message):
                    made(port, is_master=True, multi_tenant=True)

    def test_another_server(self, made):
        with (
            plain_http_server() as port,
            pytest.raises(dist.DistNetworkError, match="does not speak RankMesh"),
        ):
            made(port)

    def test_beyond_loopback_a_token_is_required(self, monkeypatch):
        with pytest.raises(ValueError, match="RANKMESH_TOKEN"):
            dist.TCPStore("192.0.2.1", 0, is_master=True)
        with pytest.raises(ValueError, match=r"TCPStore would listen on 0\.0\.0\.0.* without a token"):
            dist.TCPStore("0.0.0.0", 0, is_master=True)
        with socket.create_server(("0.0.0.0", 0)) as bound, pytest.raises(ValueError, match="without a token"):
            dist.TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=bound.fileno())
        monkeypatch.setenv("RANKMESH_TOKEN", "the secret of all")
        master = dist.TCPStore("0.0.0.0", 0, is_master=True)
        client = dist.TCPStore("127.0.0.1", master.port)
        client.set("k", "v")
        assert master.get("k") == b"v"
        client.close()
        master.close()

    def test_another_token(self, made, monkeypatch):
        monkeypatch.setenv("RANKMESH_TOKEN", "secret")
        master = made(is_master=True)
        monkeypatch.setenv("RANKMESH_TOKEN", "guess")
        with pytest.raises(
            dist.DistNetworkError, match=f"127.0.0.1:{master.port} has another token than this process: RANKMESH_TOKEN"
        ) as caught:
            made(master.port)
        assert caught.value.code == "unauthenticated"

    @pytest.mark.parametrize(
        ("arguments", "error", "what"),
        [
            ((None, 0), TypeError, "host_name must be a str, got NoneType"),
            (("127.0.0.1", "0"), TypeError, "port must be an int, got str"),
            (("127.0.0.1", 0, "2"), TypeError, "world_size must be an int, got str"),
            (("127.0.0.1", 0, 1, True, "30"), TypeError, "timeout must be a datetime.timedelta or seconds"),
            (("", 0), ValueError, "host_name is empty"),
            (("127.0.0.1", 70000), ValueError, "port must be between 0 and 65535, got 70000"),
            (("127.0.0.1", -1, 1, True), ValueError, "port must be between 0 and 65535, got -1"),
            (("127.0.0.1", 0, 0, True), ValueError, "world_size must not be 0"),
            (("127.0.0.1", 0), ValueError, "port 0, any free one, is for the master"),
            (("127.0.0.1", 0, 1, True, -1), ValueError, "timeout must not be negative"),
        ],
    )
    def test_arguments(self, arguments, error, what):
        with pytest.raises(error, match=what):
            dist.TCPStore(*arguments)


class TestTheMasterEnds:
    def test_calls_of_clients_fail(self, made, in_thread):
        master = made(is_master=True)
        client = made(master.port)
        waits = [in_thread(client.get, "k"), in_thread(client.wait, ["k"]), in_thread(client.queue_pop, "k")]
        local, table = in_thread(master.get, "k"), master._store.table
        wait_until(lambda: len(table._watches.get("k", ())) == 3 and table._pending_pops, "four waits")
        began = time.monotonic()
        master.close()
        with pytest.raises(dist.DistStoreError):
            local.result(10)
        for wait in waits:
            with pytest.raises(dist.DistNetworkError, match=f"127.0.0.1:{master.port} cannot be reached") as caught:
                wait.result(10)
            assert caught.value.address == f"http://127.0.0.1:{master.port}"
        for call in (lambda: client.set("k", "v"), lambda: client.check(["k"]), client.num_keys):
            with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
                call()
        assert time.monotonic() - began < 30

    def test_a_collected_store_is_closed(self):
        port = free_port()
        master = dist.TCPStore("127.0.0.1", port, is_master=True)
        client = dist.TCPStore("127.0.0.1", port)
        del client, master
        gc.collect()
        socket.create_server(("127.0.0.1", port)).close()


def test_over_http_the_keys_are_the_same(made):
    master = made(0, 1, True)

    def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection(master.host, master.port, timeout=60)) as connection:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()

    assert ask("PUT", "/v1/store/a/b", b"\xff") == (204, b"")
    assert master.get("a/b") == b"\xff"
    master.set("k", "v")
    assert ask("GET", "/v1/store/k") == (200, b"v")
    assert json.loads(ask("GET", "/v1/store")[1]) == ["a/b", "k", "rankmesh/workers"]
    status, body = ask("GET", "/health")
    assert (status, json.loads(body)["service"]) == (200, "rankmesh-store")


def test_a_forked_child_uses_its_parents_keys(made):
    master = made(is_master=True)
    client = made(master.port)
    master.set("k", "v")
    child = os.fork()
    if child == 0:
        try:
            wrong = [store for store in (master, client) if store.get("k") != b"v"]
            master.set("child", "was here")
            master.close()
            client.close()
            os._exit(len(wrong))
        finally:
            os._exit(99)
    assert os.waitpid(child, 0)[1] == 0
    assert master.get("child") == client.get("child") == b"was here"


def test_a_forked_child_holds_no_connection_of_its_parents(made):
    master = made(is_master=True)
    client = made(master.port)
    client.set("k", "v")
    (store_server,) = master._store.server._http._services.values()
    clients = store_server._connections
    wait_until(lambda: len(clients) == 1, "one connection")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has seen it
        os._exit(0)
    os.close(read)
    try:
        client.close()
        wait_until(lambda: not clients, "the master to see that its client has gone")
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_client_whose_handshake_is_lost_comes_again(made):
    """As with a proxy before the master, or a master that has too many clients."""
    master = made(is_master=True)
    with socket.create_server(("127.0.0.1", 0)) as front:
        threading.Thread(target=forward, args=(front, master.port, 3), daemon=True).start()
        client = made(front.getsockname()[1])
        client.set("k", "v")
        assert master.get("k") == b"v"


def forward(front: socket.socket, port: int, lost: int) -> None:
    """Close the first clients of a port after their first bytes, and forward another one to another port."""
    for _ in range(lost):
        client, _ = front.accept()
        with client:
            client.recv(1)
    client, _ = front.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as behind:
        behind.sendall(client.recv(1 << 16))
        client.sendall(behind.recv(1 << 16))  # the name of a unix socket: the client goes there
