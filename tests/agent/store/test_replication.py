"""Replication of a job's store: an owner whose replica falls silent, and a replica whose owner does."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from support.processes import wait_until

from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.store import failover, replication
from rankmesh_agent.store.base import BlockingStore
from rankmesh_agent.store.client import ClientConnection, StoreClient
from rankmesh_agent.store.codec import REPLICATE
from rankmesh_agent.store.commands import Get, Set, Wait
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.store.records import SET, encode_one
from rankmesh_agent.store.replicate import ABANDON, BEGIN, COMPLETE, Replicate
from rankmesh_agent.store.replication import Replica
from rankmesh_agent.wire.errors import DistNetworkError, StoreUnresponsiveError
from rankmesh_agent.wire.schemas import Member
from rankmesh_agent.wire.store_frames import UPGRADE


class Mesh:
    """Ranks of one process, each with its part of a job's store, as if they were on several hosts.

    Args:
        hosts: a character for each rank, its host's name.
    """

    def __init__(self, hosts: str) -> None:
        self.servers = [HttpServer(bind("127.0.0.1", 0, purpose="test"), f"rank-{rank}") for rank in range(len(hosts))]
        self.lost: set[int] = set()
        members = {
            rank: Member(rank, f"{id(self)}-{rank}", "here", host, os.getpid(), [], self.servers[rank].url())
            for rank, host in enumerate(hosts)
        }
        self.ranks = [
            JobStore(rank, members, "secret", f"store-{rank}", lambda certainly=False: set(self.lost), lambda: False)
            for rank in members
        ]
        for server, rank in zip(self.servers, self.ranks, strict=True):
            server.start(lambda: None, {UPGRADE: rank.server}, on_demand=True)
        self.store: BlockingStore = self.ranks[0].blocking()

    def silence(self, rank: int) -> Callable[[], None]:
        """Let a rank's server lose the records for the replica from now on; return what ends that."""
        server = self.ranks[rank].server
        execute = server._execute

        def lose(connection: Any, opcode: int, flags: int, *arguments: Any) -> None:
            if opcode != REPLICATE or flags & ABANDON:
                execute(connection, opcode, flags, *arguments)

        server._execute = lose  # type: ignore[method-assign]
        return lambda: setattr(server, "_execute", execute)

    def replica(self, rank: int) -> Replica:
        """Return a rank's copy of the store."""
        ownership = self.ranks[rank]._ownership
        assert ownership is not None
        return ownership.replica

    def close(self) -> None:
        """Leave, in order."""
        self.store.close()
        for rank in self.ranks:
            rank.leave()
            rank.cancel_waits()
        for server in self.servers:
            server.close()
        for rank in self.ranks:
            rank.server.close()
            rank.close()


@pytest.fixture
def mesh(monkeypatch) -> Iterator[Callable[[str], Mesh]]:
    """Makes ranks whose owner would wait for a long time for a replica that it cannot abandon."""
    monkeypatch.setattr(replication, "SILENT_SECONDS", 600.0)
    monkeypatch.setattr(replication, "PATIENCE_SECONDS", 1.2)
    with contextlib.ExitStack() as undo:

        def make(hosts: str) -> Mesh:
            made = Mesh(hosts)
            undo.callback(made.close)
            for rank in made.ranks:
                rank.start()
            return made

        yield make


def has(replica: Replica, key: str) -> bool:
    return replica.current and key in replica.state.values


def test_a_change_does_not_wait_for_a_silent_replica(mesh):
    ranks = mesh("abb")
    ranks.store.execute(Set("first", b"1"))
    assert has(ranks.replica(1), "first")
    ranks.silence(1)
    ranks.store.execute(Set("second", b"2"))
    assert ranks.store.execute(Get("second")) == b"2"
    assert has(ranks.replica(2), "second"), "the next rank has the copy: the host is not silent"


def test_of_a_host_that_acknowledges_nothing_no_other_rank_is_tried(mesh, monkeypatch):
    monkeypatch.setattr(StoreClient, "_connect_unix", lambda _: None)
    monkeypatch.setattr(replication, "silent_seconds", lambda sock: 1.0)
    ranks = mesh("abbc")
    ranks.store.execute(Set("first", b"1"))
    ranks.silence(1)
    ranks.store.execute(Set("second", b"2"))
    assert has(ranks.replica(3), "second")
    assert not ranks.replica(2).current


def test_a_rank_has_more_time_to_begin_as_the_replica_than_to_respond(mesh, monkeypatch):
    """It may not have started to serve, and without it the store would end with its owner."""
    limits = []
    connect = StoreClient.connect

    def record(client: StoreClient, timeout: float) -> ClientConnection:
        limits.append(timeout)
        return connect(client, timeout)

    monkeypatch.setattr(StoreClient, "connect", record)
    ranks = mesh("ab")
    ranks.store.execute(Set("first", b"1"))
    assert limits[0] == replication.SILENT_SECONDS


def test_a_silent_replica_learns_that_it_is_none_before_the_connection_ends(mesh):
    ranks = mesh("ab")
    ranks.store.execute(Set("first", b"1"))
    ranks.silence(1)
    ranks.store.execute(Set("second", b"2"))
    wait_until(lambda: not ranks.replica(1).current, "the end of the connection")
    assert not ranks.replica(1).usable, "or it would take over without the second key if the owner died"


def test_a_replica_that_responds_again_gets_the_present_state(mesh):
    ranks = mesh("ab")
    ranks.store.execute(Set("first", b"1"))
    respond = ranks.silence(1)
    ranks.store.execute(Set("second", b"2"))
    respond()
    wait_until(lambda: has(ranks.replica(1), "second"), "a new copy")
    ranks.store.execute(Set("third", b"3"))
    assert has(ranks.replica(1), "third")


def test_a_replica_takes_over_beside_a_rank_that_was_the_replica_before_it(mesh):
    ranks = mesh("abc")
    ranks.store.execute(Set("first", b"1"))
    ranks.silence(1)
    ranks.store.execute(Set("second", b"2"))
    assert has(ranks.replica(2), "second")
    ranks.ranks[0].leave()
    ranks.servers[0].close()
    ranks.lost.add(0)
    for rank in (1, 2):
        with contextlib.closing(ranks.ranks[rank].blocking()) as store:
            assert store.execute(Get("second"), 10.0) == b"2"
    assert ranks.ranks[2]._ownership.owned


def test_an_owner_waits_longer_for_a_replica_that_it_cannot_tell(mesh, monkeypatch):
    ranks = mesh("ab")
    ranks.store.execute(Set("first", b"1"))
    ranks.silence(1)
    monkeypatch.setattr(replication, "_abandon", lambda connection: False)
    waited = []
    monkeypatch.setattr(replication, "_wait_for_end", lambda connection, seconds: waited.append(seconds))
    ranks.store.execute(Set("second", b"2"))
    assert 590 < waited[0] < 600


@pytest.fixture
def lost(mesh) -> Mesh:
    """Ranks 1 and 2 of three, the first of which has been shrunk away; rank 1 has the store, and has no replica."""
    ranks = mesh("abc")
    ranks.store.execute(Set("key", b"value"))
    ranks.silence(2)
    for rank in (1, 2):
        ranks.ranks[rank].exclude([0])
    with contextlib.closing(ranks.ranks[1].blocking()) as store:
        assert store.execute(Get("key")) == b"value"
    for rank in (1, 2):
        ranks.ranks[rank].renumber([1, 2])
    return ranks


def test_a_lost_store_names_the_ranks_of_the_world_as_it_is_now(lost):
    lost.servers[1].close()
    lost.lost.add(1)
    with contextlib.closing(lost.ranks[2].blocking()) as store, pytest.raises(DistNetworkError) as caught:
        store.execute(Get("key"))
    assert "the job's store is lost with rank 0 (here, pid " in str(caught.value)
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize("command", [Set("key", b"value"), Wait(("key",), 0.2)], ids=["set", "wait"])
def test_a_call_to_an_owner_that_cannot_be_reached_ends_with_its_time_limit(mesh, monkeypatch, command):
    """As on the other side of a cut network: each attempt to connect ends only at its time limit."""
    ranks = mesh("ab")

    def time_out(*arguments: Any) -> NoReturn:
        raise TimeoutError("timed out")

    monkeypatch.setattr(failover, "FAILOVER_SECONDS", 600.0)
    with contextlib.closing(ranks.ranks[1].blocking()) as store:
        store.timeout = 1.0
        monkeypatch.setattr(socket, "create_connection", time_out)
        with pytest.raises(StoreUnresponsiveError) as caught:
            store.execute(command)
    assert caught.value.ranks == (0,)
    assert f"did not respond to {command.name} within {'0.2 s and 1.5 s more' if command.seconds else '1 s'}" in str(
        caught.value
    )


# The replica's side


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(replication, "time", clock)
    return clock


@pytest.fixture
def replica(clock) -> Replica:
    """A replica that has a key; the owner has had all responses but the last a moment ago."""
    found = Replica()
    assert found.receive(b"owner", Replicate(BEGIN, owner=0))
    assert found.receive(b"owner", Replicate(COMPLETE, (encode_one(SET, "key", b"value"),)))
    assert found.current
    assert not found.usable
    assert found.owner == 0
    return found


@pytest.mark.parametrize(("reset", "seconds", "usable"), [(False, 5.9, True), (False, 6.1, False), (True, 1.1, True)])
def test_it_takes_over_soon_after_the_last_response(replica, clock, reset, seconds, usable):
    clock.now += seconds
    replica.on_closed(b"owner", by_peer=True, reset=reset)
    assert replica.usable == usable


def test_it_does_not_take_over_if_the_last_words_of_a_patient_owner_may_be_lost(replica, clock):
    clock.now += replication.PATIENCE_SECONDS - 0.2
    replica.on_closed(b"owner", by_peer=True, reset=True)
    assert not replica.usable


def test_an_abandoned_replica_does_not_take_over(replica):
    assert not replica.receive(b"owner", Replicate(ABANDON))
    replica.on_closed(b"owner", by_peer=True)
    assert not replica.current
    assert not replica.usable


def test_an_earlier_connection_does_not_count(replica):
    assert replica.receive(b"next", Replicate(BEGIN | COMPLETE, owner=1))
    assert not replica.receive(b"owner", Replicate(ABANDON))
    replica.on_closed(b"owner", by_peer=True)
    assert replica.current
    assert replica.owner == 1
