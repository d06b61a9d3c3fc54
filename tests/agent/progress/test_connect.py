"""Every pair of ranks gets its connection, or everybody is told who is missing and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import pytest
from support import threads
from support.connecting import NoGateway, connect_all
from support.me import wait_until
from support.pauses import despite_pauses
from support.threads import TRANSPORTS, in_threads, transport_named

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError
from rankmesh_agent.progress import connector as connector_module
from rankmesh_agent.progress import outgoing
from rankmesh_agent.progress.connector import Connector
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.shared_memory.mapping import NoSharedMemoryError
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.tcp import Proposal, TcpTransport
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, GatewayUnreachableError
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import Member

EPOCH = 3


class Ranks:
    """Listening ranks of one transport, their engines, and their peer table."""

    def __init__(self, size: int, transport: TcpTransport) -> None:
        self.transport = transport
        self.listeners = [transport.listen("127.0.0.1:0") for _ in range(size)]
        self.engines = [ProgressEngine(rank, EPOCH, size, eager_limit=1 << 16) for rank in range(size)]
        self.members = [
            Member(rank, f"{rank:032x}", "here", "host", os.getpid(), [listener.address], "")
            for rank, listener in enumerate(self.listeners)
        ]
        self._connectors: list[Connector] = []

    def connect(self, rank: int, members: Sequence[Member] = (), deadline: Deadline | None = None) -> None:
        """Connect one rank to all others."""
        connect_all(self.engines[rank], members or self.members, self.listeners[rank], self.transport, deadline)

    def on_demand(self, rank: int, members: Sequence[Member] = (), gateway: NoGateway | None = None) -> Connector:
        """Have one rank, which has joined without neighbours, connect on demand."""
        members = members or self.members
        made = Connector(
            members[rank], members, EPOCH, self.listeners[rank], lambda _: self.transport, gateway or NoGateway()
        )
        self._connectors.append(made)
        made.connect(self.engines[rank], [], Deadline(60))
        return made

    def close(self) -> None:
        for connector in self._connectors:
            connector.close()
        for engine in self.engines:
            engine.close(timeout=0.1)
        for listener in self.listeners:
            listener.close()


class Until(Deadline):
    """A deadline that passes with a condition."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__(60)
        self._condition = condition

    def expired(self) -> bool:
        return self._condition() or super().expired()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def listening(size: int, transport: TcpTransport) -> Iterator[Ranks]:
    gc.collect()
    before = descriptors()
    ranks = Ranks(size, transport)
    try:
        yield ranks
    finally:
        ranks.close()
    gc.collect()  # memory that was shared is kept by the frames of errors
    assert descriptors() <= before


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Where the ranks make shared memory."""
    monkeypatch.setattr(threads, "SHM", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def check_each_reaches_each(engines: Sequence[ProgressEngine]) -> None:
    for rank, engine in enumerate(engines):
        assert sorted(engine.connected()) == [peer for peer in range(len(engines)) if peer != rank]
        engine.say_goodbye(Goodbye(f"I am {rank}"))
    for rank, engine in enumerate(engines):
        assert engine.wait(lambda lost=engine.lost_peers: len(lost) == len(engines) - 1, Deadline(60))
        assert {peer: f"I am {peer}" for peer in range(len(engines)) if peer != rank} == {
            peer: end.reason for peer, end in engine.lost_peers.items()
        }


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_reaches_each(name: str, size: int) -> None:
    with listening(size, transport_named(name)) as ranks:
        in_threads(size, ranks.connect)
        check_each_reaches_each(ranks.engines)
    assert not [each for each in threading.enumerate() if isinstance(each, Connector)]


def reason(function: Callable[[], object]) -> str:
    """Return why a call fails."""
    with pytest.raises(DistNetworkError) as caught:
        function()
    return str(caught.value)


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Address of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@despite_pauses
@pytest.mark.parametrize("missing", [1, 2])
def test_who_cannot_be_reached_is_named_with_its_addresses(
    missing: int, silent_address: str, unused_address: str
) -> None:
    with listening(4, transport_named("segment")) as ranks:
        members = list(ranks.members)
        members[1] = replace(members[1], addresses=[unused_address])
        members[2] = replace(members[2], addresses=[silent_address])
        there = [member for member in members if member.rank != 3 - missing]
        met = threading.Barrier(2)

        def others(rank: int) -> str:
            deadline = Until(lambda: ranks.engines[rank].is_connected(3 - rank) and met.wait(60) >= 0)
            return reason(lambda: ranks.connect(rank, there, deadline))

        found = in_threads(2, lambda number: others((0, 3)[number]))
        assert "rank 0 at" in found[0]
        assert f"was not reached by rank {missing}" in found[0]
        assert f"rank 3 on here cannot reach rank {missing}" in found[1]
        assert f"{members[missing].addresses[0]}: " in found[1]
        assert ("no answer within " if missing == 2 else "Connection refused") in found[1]


@pytest.mark.parametrize(("answers", "names_the_gateway"), [(False, True), (True, False)])
def test_a_gateway_that_is_slow_to_answer_counts_as_gone_after_a_while_only(
    answers: bool, names_the_gateway: bool, silent_address: str, monkeypatch
) -> None:
    """A hundred ranks that start on a few cores keep it busy for longer than the time limit of a request."""
    monkeypatch.setattr(connector_module, "_STALLED_SECONDS", 0.02)
    monkeypatch.setattr(connector_module, "_MAX_STALLED_SECONDS", 0.08)
    monkeypatch.setattr(connector_module, "_SILENT_SECONDS", 0.5)
    checks: list[float] = []

    def raise_if_left(_: NoGateway) -> bool:
        checks.append(time.monotonic())
        return answers

    monkeypatch.setattr(NoGateway, "raise_if_left", raise_if_left)
    with listening(2, transport_named("segment")) as ranks:
        members = [replace(ranks.members[0], addresses=[silent_address]), ranks.members[1]]
        began = time.monotonic()
        text = reason(lambda: ranks.connect(1, members, Deadline(1.5)))
        assert time.monotonic() - began > 0.5, "it had time"
    assert ("the gateway does not answer any more" in text) == names_the_gateway
    assert "rank 0" in text
    assert len(checks) < 40, "checks at growing intervals leave the gateway time for others"


def test_the_address_that_answers_is_taken(unused_address: str, silent_address: str, monkeypatch) -> None:
    monkeypatch.setattr(outgoing, "_ATTEMPT_SECONDS", 0.2)
    with listening(3, TcpTransport("secret")) as ranks:
        members = [
            replace(member, addresses=[unused_address, silent_address, *member.addresses]) for member in ranks.members
        ]
        in_threads(3, lambda rank: ranks.connect(rank, members))
        check_each_reaches_each(ranks.engines)


def test_who_listens_late_is_reached() -> None:
    transport = TcpTransport("secret")
    with listening(2, transport) as ranks, socket.socket() as holder:
        ranks.listeners[0].close()
        host, port = ranks.members[0].addresses[0].split(":")
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, int(port)))  # no other program is given it meanwhile

        def connect(rank: int) -> None:
            if rank == 0:
                time.sleep(0.3)
                ranks.listeners[0] = transport.listen(ranks.members[0].addresses[0])
            ranks.connect(rank)

        in_threads(2, connect)
        check_each_reaches_each(ranks.engines)


def test_a_rank_with_another_token_raises_at_once() -> None:
    with listening(2, TcpTransport("secret")) as ranks:
        over = threading.Event()

        def connect(rank: int) -> None:
            if rank == 0:
                with contextlib.suppress(DistNetworkError):
                    ranks.connect(rank, deadline=Until(over.is_set))
                return
            ranks.transport = TcpTransport("another")
            try:
                ranks.connect(rank)
            finally:
                over.set()

        with pytest.raises(AuthenticationError):
            in_threads(2, connect)


STRANGE: dict[str, Callable[[Member], Member]] = {
    "process": lambda member: replace(member, instance="f" * 32),
    "rank": lambda member: replace(member, rank=member.rank + 5),
}


@pytest.mark.parametrize("strange", [*STRANGE, "epoch", "callee"])
@despite_pauses
def test_who_is_not_in_the_table_is_told_so_and_not_let_in(strange: str) -> None:
    """Another process at a known address, or one of another epoch, knows the token but does not belong here."""
    with listening(2, TcpTransport("secret")) as ranks:
        caller = STRANGE[strange](ranks.members[1]) if strange in STRANGE else ranks.members[1]
        callee = replace(ranks.members[0], instance="e" * 32) if strange == "callee" else ranks.members[0]
        stranger = ProgressEngine(caller.rank, EPOCH + (strange == "epoch"), 2, eager_limit=1 << 16)
        refused_once = threading.Event()

        def connect(rank: int) -> None:
            if rank == 0:
                ranks.connect(0, deadline=Until(refused_once.is_set))
            try:
                connect_all(stranger, [callee, caller], ranks.listeners[1], ranks.transport, Deadline(1))
            finally:
                refused_once.set()

        waiting, refused = in_threads(2, lambda rank: reason(lambda: connect(rank)))
        stranger.close()
        assert "was not reached by rank 1" in waiting
        assert "another process has that address" in refused


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_abandoned_connection_does_not_count(name: str) -> None:
    """A client that gave up while the other rank was stopped makes a second attempt."""
    transport = transport_named(name)
    with listening(2, transport) as ranks:
        identity = outgoing.IDENTITY.pack(1, EPOCH, *(ranks.members[at].instance.encode() for at in (1, 0)))
        first = transport.dial(ranks.listeners[0].address, identity)
        first.advance()
        first.close()
        in_threads(2, ranks.connect)
        check_each_reaches_each(ranks.engines)


def test_ctrl_c_leaves_nothing_behind(silent_address: str) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    with listening(2, TcpTransport("secret")) as ranks:
        members = [replace(ranks.members[0], addresses=[silent_address]), ranks.members[1]]
        gc.collect()
        before = descriptors()
        with pytest.raises(KeyboardInterrupt):
            ranks.connect(1, members, Until(interrupt))
        assert descriptors() == before - 1  # the listener


@pytest.mark.parametrize("name", TRANSPORTS)
def test_ranks_that_dial_each_other_at_once_agree_on_one_connection(name: str, monkeypatch) -> None:
    size, added, add = 6, Counter[tuple[int, int]](), ProgressEngine.add_connection

    def counted(self: ProgressEngine, rank: int, connection: Connection) -> None:
        added[self.rank, rank] += 1
        add(self, rank, connection)

    monkeypatch.setattr(ProgressEngine, "add_connection", counted)
    with listening(size, transport_named(name)) as ranks:
        for rank in range(size):
            ranks.on_demand(rank)
        begun = threading.Barrier(size)

        def dial_all(rank: int) -> None:
            engine = ranks.engines[rank]
            begun.wait()
            with engine.lock:
                engine.connect(range(size))
            assert engine.wait(lambda: len(engine.connected()) == size - 1, Deadline(60))

        in_threads(size, dial_all)
        assert set(added.values()) == {1}
        check_each_reaches_each(ranks.engines)


def test_a_rank_that_cannot_be_reached_is_dialled_again() -> None:
    with listening(2, TcpTransport("secret")) as ranks:
        ranks.listeners[1].close()
        connector = ranks.on_demand(0)
        with ranks.engines[0].lock:
            ranks.engines[0].connect([1])
        wait_until(lambda: any(each.rounds for each in list(connector._outgoing.values())), "an attempt")
        host, port = ranks.members[1].addresses[0].split(":")
        with socket.create_server((host, int(port))) as server:
            server.settimeout(10)
            server.accept()[0].close()


def test_a_rank_without_a_free_descriptor_connects_once_it_has_one(monkeypatch, caplog) -> None:
    """The other rank is not to blame. A join ends, since no other rank waits for a message of this one yet."""
    transport = TcpTransport("secret")
    offer = transport._offer

    def exhausted() -> Proposal:
        monkeypatch.setattr(transport, "_offer", offer)
        raise NoSharedMemoryError("cannot make shared memory") from OSError(errno.EMFILE, "Too many open files")

    with listening(2, transport) as ranks, caplog.at_level(logging.WARNING):
        one, _ = ranks.on_demand(0), ranks.on_demand(1)
        monkeypatch.setattr(transport, "_offer", exhausted)
        with ranks.engines[0].lock:
            ranks.engines[0].connect([1])
        wait_until(lambda: all(engine.connected() for engine in ranks.engines), "the connection")
        assert one.failures == {}
    with listening(2, transport) as ranks:
        monkeypatch.setattr(transport, "_offer", exhausted)
        with pytest.raises(DescriptorLimitError, match="rank 1 cannot connect to rank 0"):
            ranks.connect(1)


class LateGateway(NoGateway):
    """A gateway that does not answer yet."""

    def __init__(self, ranks: Ranks) -> None:
        self.away = True
        self.asked: list[set[int]] = []
        self._ranks = ranks

    def find_members(self, ranks: Collection[int]) -> list[Member]:
        self.asked.append(set(ranks))
        if self.away:
            raise GatewayUnreachableError("the gateway at http://g does not answer")
        return [self._ranks.members[rank] for rank in ranks]


@despite_pauses
@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_address_that_the_gateway_has_is_waited_for_and_connected_to(name: str, monkeypatch) -> None:
    """Also by the other rank, which does not know the address, or the instance, of the one that connects to it."""
    monkeypatch.setattr(connector_module, "_FIND_SECONDS", 0.01)
    with listening(3, transport_named(name)) as ranks:
        bare = [replace(member, instance="", addresses=[], http="") for member in ranks.members]
        tables = [[ranks.members[each] if each == rank else bare[each] for each in range(3)] for rank in range(3)]
        gateway, engine = LateGateway(ranks), ranks.engines[0]
        ranks.on_demand(0, tables[0], gateway)
        with engine.lock:
            engine.connect([1, 2])
        wait_until(lambda: len(gateway.asked) > 2, "more attempts")
        why = "its address is not known, and the gateway at http://g does not answer"
        assert engine.unaddressed == {1: why, 2: why}
        gateway.away = False
        ranks.on_demand(1, tables[1])
        wait_until(lambda: engine.is_connected(1) and ranks.engines[1].is_connected(0), "both ends")
        assert engine.unaddressed == {}
        assert all(each <= {1, 2} for each in gateway.asked)
