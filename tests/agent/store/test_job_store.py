"""A rank's client of its job's store: while the gateway is away, calls wait for it; failures end waits."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.processes import free_port, wait_until

from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.store import client as store_client
from rankmesh_agent.store.client_connection import ClientConnection, Connector
from rankmesh_agent.store.commands import Add, Get, QueueLen, QueuePop, QueuePush, Set, Wait
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.wire.errors import (
    DistNetworkError,
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    RankFailedError,
    StoreLostError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.hello import Service
from rankmesh_agent.wire.schemas import Member

ID = "0f" * 16
FAILURE = RankFailedError("rank 2 (host, pid 7) failed (killed)", ranks=[2], group="world")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch) -> None:
    monkeypatch.setattr(Connector, "_connect_unix", lambda _: None)


@pytest.fixture
def job() -> Iterator[Callable[..., JobStore]]:
    """Makes the job's stores at a URL."""
    with contextlib.ExitStack() as opened:
        yield lambda url, *limits: opened.enter_context(contextlib.closing(JobStore(url, "secret", ID, *limits)))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


class TestBreaks:
    """Connections break one after the other, and the server executes each request once."""

    @pytest.mark.parametrize("lost", ["request", "answer"])
    @pytest.mark.parametrize("times", [1, 2, 5])
    def test_writes(self, job, losing, table, call, lost, times):
        command, result, end = call
        Set("k", b"1").apply(table)
        with losing(lost, times=times) as url:
            assert job(url).execute(command) == result
        assert table.value("k") == end

    @pytest.mark.parametrize("lost", ["request", "answer"])
    def test_queues(self, job, losing, table, lost):
        with losing(lost, times=3) as url:
            job(url).execute(QueuePush("q", b"1"))
        table.push("q", b"2")
        for left in (b"1", b"2"):
            with losing(lost, times=3) as url:
                assert job(url).execute(QueuePop("q", 30.0)) == left
        assert table.length("q") == 0

    def test_a_malformed_response(self, job, url, table, monkeypatch):
        call, malformed = ClientConnection.call, []

        def break_the_first(*arguments: Any) -> Any:
            result = call(*arguments)
            if not malformed:
                malformed.append(result)
                raise ProtocolError("malformed")
            return result

        monkeypatch.setattr(ClientConnection, "call", break_the_first)
        assert [job(url).execute(Add("n")) for _ in range(2)] == [1, 2]
        assert malformed == [1]

    def test_a_pop_that_waits(self, job, losing, table, threads):
        """Each answer that is lost had the value; so has the last."""
        with losing(times=4) as url:
            popped = threads.submit(job(url).execute, QueuePop("q", 30.0))
            wait_until(lambda: table._pending_pops, "the wait")
            table.push("q", b"1")
            table.push("q", b"2")
            assert popped.result(30) == b"1"
        assert table.length("q") == 1


class TestAGatewayThatIsAway:
    @pytest.fixture
    def start(self, store_server) -> Iterator[Callable[[int], None]]:
        """Starts the gateway at a port."""
        with contextlib.ExitStack() as running:

            def start(port: int) -> None:
                http = HttpServer(bind("127.0.0.1", port, purpose="test"), "gateway")
                http.start(lambda: None, {Service.STORE: store_server}, on_demand=True)
                running.callback(http.close)

            yield start

    @pytest.mark.parametrize(
        ("command", "result"), [(Add("n"), 8), (Get("n", 30.0), b"7"), (Wait(("n",), 30.0), None), (QueueLen("q"), 0)]
    )
    def test_calls_wait_for_it(self, job, start, table, threads, command, result):
        Set("n", b"7").apply(table)
        port = free_port()
        called = threads.submit(job(f"http://127.0.0.1:{port}").execute, command)
        time.sleep(0.1)
        assert not called.done()
        start(port)
        assert called.result(30) == result

    @pytest.mark.parametrize(("command", "seconds"), [(Add("n"), 0.3), (Get("n", 0.2), 0.1)])
    def test_not_beyond_their_time_limit(self, job, command, seconds):
        began = time.monotonic()
        with pytest.raises(DistNetworkError, match=r"the job's store, at the gateway at \S+, cannot be reached"):
            job(f"http://127.0.0.1:{free_port()}").execute(command, seconds)
        assert time.monotonic() - began < 10

    def test_because_of_a_rank_that_failed_until_the_world_shrinks(self, job):
        """Another rank has its number afterwards."""
        store = job(f"http://127.0.0.1:{free_port()}")
        store.fail_waits(FAILURE)
        refused = r"cannot be reached: \[Errno \d+\] Connection refused"
        with pytest.raises(DistNetworkError, match=f"{refused}; {re.escape(FAILURE.message)}$"):
            store.execute(Get("n", 0.2), 0.1)
        store.failure = None  # as Agent.set_world has it
        with pytest.raises(DistNetworkError, match=f"{refused}$"):
            store.execute(Get("n", 0.2), 0.1)

    def test_one_that_does_not_respond(self, job):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(StoreUnresponsiveError, match=rf"gateway at {url}, .* add within 0\.2 s\."):
                job(url).execute(Add("n"), 0.2)

    @pytest.mark.parametrize("end", ["a failure", "close"])
    def test_the_end_of_waits(self, job, threads, monkeypatch, end):
        """Only a wait ends with a failure; a call that does not wait goes on."""
        monkeypatch.setattr(store_client, "_LONGEST_PAUSE", 0.05)
        store = job(f"http://127.0.0.1:{free_port()}")
        waiting, writing = (threads.submit(store.execute, command) for command in (Get("k", 60.0), Set("k", b"")))
        time.sleep(0.1)
        if end == "a failure":
            store.fail_waits(FAILURE)
            with pytest.raises(RankFailedError, match=r"rank 2 .* cannot be reached"):
                waiting.result(20)
            assert not writing.done()
        store.close()
        for each in (writing, waiting):
            assert each.exception(20) is not None


class TestWaits:
    @pytest.mark.parametrize("command", [Get("k", 0.05), Wait(("k",), 0.05), QueuePop("k", 0.05)])
    def test_one_in_vain_names_the_ranks_without_descriptors(self, job, url, command):
        member = Member(3, "i", "host", "h", 7, [], "http://127.0.0.1:1")
        asked: list[float] = []
        store = job(url, lambda since: asked.append(since) or [(member, "no free descriptor")])
        began = time.monotonic()
        with pytest.raises(
            StoreTimeoutError, match=r"waited 0\.05 s, but .*rank 3 .* reports: no free descriptor"
        ) as caught:
            store.execute(command)
        assert caught.value.ranks == (3,)
        assert asked[0] >= began - 0.05
        with pytest.raises((KeyNotFoundError, StoreTimeoutError, QueueEmptyError)) as caught:
            store.execute(command.with_timeout(0.0))
        assert not caught.value.ranks


def test_a_store_that_is_another_is_lost(job):
    store = job("http://127.0.0.1:1")
    store.check_same(ID)
    for other in ("", "00" * 16):
        with pytest.raises(StoreLostError, match=r"http://127\.0\.0\.1:1 was started after the job"):
            store.check_same(other)
    with pytest.raises(ProtocolError, match="of an earlier version"):
        JobStore("http://127.0.0.1:1", "secret", "")
