"""Every pair of ranks gets its connection, or everybody is told who is missing and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import pytest
from support import threads
from support.connecting import connect_all, meet, recv_exactly, send_all
from support.me import wait_until
from support.pauses import despite_pauses
from support.threads import TRANSPORTS, in_threads, transport_named

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError
from rankmesh_agent.progress import connect as connect_module
from rankmesh_agent.progress import connector_thread
from rankmesh_agent.progress.connect import Connector
from rankmesh_agent.progress.connector_thread import ConnectorThread
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.shared_memory import NoSharedMemoryError
from rankmesh_agent.transports.tcp import Proposal, TcpTransport
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, GatewayUnreachableError
from rankmesh_agent.wire.schemas import Member

EPOCH = 3


class Ranks:
    """Listening ranks of one transport, and their peer table."""

    def __init__(self, size: int, transport: TcpTransport) -> None:
        self.transport = transport
        self.listeners = [transport.listen("127.0.0.1:0") for _ in range(size)]
        self.members = [
            Member(rank, f"{rank:032x}", "here", "host", os.getpid(), [listener.address], "")
            for rank, listener in enumerate(self.listeners)
        ]

    def connect(
        self, rank: int, members: Sequence[Member] = (), deadline: Deadline | None = None
    ) -> dict[int, Connection]:
        """Connect one rank to all others."""
        members = members or self.members
        return connect_all(
            members[rank], members, EPOCH, self.listeners[rank], lambda peer: self.transport, deadline or Deadline(60)
        )


class Until(Deadline):
    """A deadline that passes with a condition."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__(60)
        self._condition = condition

    def expired(self) -> bool:
        return self._condition() or super().expired()


@contextlib.contextmanager
def listening(size: int, transport: TcpTransport) -> Iterator[Ranks]:
    ranks = Ranks(size, transport)
    try:
        yield ranks
    finally:
        for listener in ranks.listeners:
            listener.close()


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Where the ranks make shared memory."""
    monkeypatch.setattr(threads, "SHM", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def check_each_reaches_each(made: Sequence[dict[int, Connection]]) -> None:
    for rank, connections in enumerate(made):
        assert sorted(connections) == [peer for peer in range(len(made)) if peer != rank]
        for peer, connection in connections.items():
            send_all(connection, bytes([rank, peer]), Deadline(10))
    for rank, connections in enumerate(made):
        for peer, connection in connections.items():
            assert recv_exactly(connection, 2, Deadline(10)) == bytes([peer, rank])
            connection.close()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_reaches_each(name: str, size: int) -> None:
    with listening(size, transport_named(name)) as ranks:
        check_each_reaches_each(in_threads(size, ranks.connect))


def reason(function: Callable[[], object]) -> str:
    """Return why a call fails."""
    with pytest.raises(DistNetworkError) as caught:
        function()
    return str(caught.value)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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
def test_who_cannot_be_reached_is_named_with_its_addresses_and_nothing_is_left(
    silent_address: str, unused_address: str
) -> None:
    with listening(4, transport_named("segment")) as ranks:
        members = list(ranks.members)
        members[1] = replace(members[1], addresses=[unused_address])
        members[2] = replace(members[2], addresses=[silent_address])
        gc.collect()
        before = descriptors()
        for missing in (1, 2):
            there = [member for member in members if member.rank != 3 - missing]

            met = threading.Barrier(2)

            def others(rank: int, there: Sequence[Member] = there, met: threading.Barrier = met) -> str:
                connector = Connector(members[rank], there, EPOCH, ranks.listeners[rank], lambda peer: ranks.transport)
                deadline = Until(lambda: 3 - rank in connector.connections and met.wait(60) >= 0)
                return reason(lambda: connector.connect([each.rank for each in there if each.rank != rank], deadline))

            found = in_threads(2, lambda number: others((0, 3)[number]))
            assert "rank 0 at" in found[0]
            assert f"was not reached by rank {missing}" in found[0]
            assert f"rank 3 on here cannot reach rank {missing}" in found[1]
            assert f"{members[missing].addresses[0]}: " in found[1]
            assert ("no answer within " if missing == 2 else "Connection refused") in found[1]
        gc.collect()  # memory that was shared is kept by the frames of the errors
        assert descriptors() <= before


@pytest.mark.parametrize(("answers", "names_the_gateway"), [(False, True), (True, False)])
def test_a_gateway_that_is_slow_to_answer_counts_as_gone_after_a_while_only(
    answers: bool, names_the_gateway: bool, silent_address: str, monkeypatch
) -> None:
    """A hundred ranks that start on a few cores keep it busy for longer than the time limit of a request."""
    monkeypatch.setattr(connect_module, "_STALLED_SECONDS", 0.02)
    monkeypatch.setattr(connect_module, "_MAX_STALLED_SECONDS", 0.08)
    monkeypatch.setattr(connect_module, "_SILENT_SECONDS", 0.5)
    checks: list[float] = []

    def raise_if_left() -> bool:
        checks.append(time.monotonic())
        return answers

    with listening(2, transport_named("segment")) as ranks:
        members = [replace(ranks.members[0], addresses=[silent_address]), ranks.members[1]]
        connector = Connector(members[1], members, EPOCH, ranks.listeners[1], lambda peer: ranks.transport)
        began = time.monotonic()
        text = reason(lambda: connector.connect([0], Deadline(1.5), raise_if_left))
        assert time.monotonic() - began > 0.5, "it had time"
    assert ("the gateway does not answer any more" in text) == names_the_gateway
    assert "rank 0" in text
    assert len(checks) < 40, "checks at growing intervals leave the gateway time for others"


def test_the_address_that_answers_is_taken(unused_address: str, silent_address: str, monkeypatch) -> None:
    monkeypatch.setattr(connect_module, "_ATTEMPT_SECONDS", 0.2)
    with listening(3, TcpTransport("secret")) as ranks:
        members = [
            replace(member, addresses=[unused_address, silent_address, *member.addresses]) for member in ranks.members
        ]
        check_each_reaches_each(in_threads(3, lambda rank: ranks.connect(rank, members=members)))


def test_who_listens_late_is_reached() -> None:
    transport = TcpTransport("secret")
    with listening(2, transport) as ranks, socket.socket() as holder:
        ranks.listeners[0].close()
        host, port = ranks.members[0].addresses[0].split(":")
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, int(port)))  # no other program is given it meanwhile

        def connect(rank: int) -> dict[int, Connection]:
            if rank == 0:
                time.sleep(0.3)
                ranks.listeners[0] = transport.listen(ranks.members[0].addresses[0])
            return ranks.connect(rank)

        check_each_reaches_each(in_threads(2, connect))


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
        epoch = EPOCH + (strange == "epoch")

        refused_once = threading.Event()

        def connect(rank: int) -> dict[int, Connection]:
            if rank == 0:
                return ranks.connect(0, deadline=Until(refused_once.is_set))
            connector = Connector(caller, [callee, caller], epoch, ranks.listeners[1], lambda peer: ranks.transport)
            try:
                return connector.connect([0], Until(lambda: bool(connector.unreached())))
            finally:
                refused_once.set()

        waiting, refused = in_threads(2, lambda rank: reason(lambda: connect(rank)))
        assert "was not reached by rank 1" in waiting
        assert "another process has that address" in refused


def test_who_calls_again_is_known_by_the_latest_call() -> None:
    """A client that gave up, and of which the listener does not know that it has."""
    with listening(3, TcpTransport("secret")) as ranks:
        first: list[Connection] = []
        called = threading.Event()

        def connect(rank: int) -> dict[int, Connection]:
            if rank == 2:
                identity = connect_module._IDENTITY.pack(
                    2, EPOCH, *(ranks.members[at].instance.encode() for at in (2, 0))
                )
                (connection,), _ = meet([ranks.transport.dial(ranks.listeners[0].address, identity)])
                first.append(connection)
                called.set()
            if rank == 1:  # until it comes, rank 0 is not done
                assert called.wait(20)
                with pytest.raises(DistNetworkError, match="lost"):
                    recv_exactly(first[0], 1, Deadline(20))
            return ranks.connect(rank)

        check_each_reaches_each(in_threads(3, connect))
        first[0].close()


def test_ctrl_c_leaves_nothing_behind(silent_address: str) -> None:
    class Interrupted:
        address = ""

        def descriptors(self) -> list[int]:
            return []

        def accept(self, ready, admits):
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    transport = TcpTransport("secret")
    me, peer = (Member(rank, f"{rank:032x}", "here", "host", 1, [silent_address], "") for rank in (1, 0))
    gc.collect()
    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        connect_all(me, [me, peer], EPOCH, Interrupted(), lambda peer: transport, Deadline(10))
    assert descriptors() == before


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ([(65536, "auto"), (65536, "tcp"), (65536, "auto")], None),
        ([(-1, ""), (1024, "shm"), (1024, "auto")], None),  # an older version does not report its settings
        ([(65536, ""), (65536, ""), (1024, "")], r"EAGER_BYTES .*: 65536 on rank 0 .*, rank 1 .*; 1024 on rank 2 "),
        ([(0, "tcp"), (0, "shm"), (0, "tcp")], r"TRANSPORT .*: tcp on rank 0 .*, rank 2 .*; shm on rank 1 \(here, pid"),
        (
            [(512 if rank == 9 else 1024, "") for rank in range(20)],
            r"rank 3 \(here, pid 7\) and 15 more; 512 on rank 9 ",
        ),
    ],
)
def test_settings_that_have_to_be_the_same_are_compared(settings: list[tuple[int, str]], error: str | None) -> None:
    members = [
        Member(rank, f"{rank:032x}", "here", "host", 7, ["127.0.0.1:1"], "", eager, transport)
        for rank, (eager, transport) in enumerate(settings)
    ]
    if error is None:
        connect_module.check_settings(members)
    else:
        with pytest.raises(DistNetworkError, match=error) as caught:
            connect_module.check_settings(members)
        assert len(members) == 3 or caught.value.ranks == (9,)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_ranks_that_dial_each_other_at_once_agree_on_one_connection(name: str) -> None:
    size, transport = 6, transport_named(name)
    with listening(size, transport) as ranks:
        begun = threading.Barrier(size)

        def dial_all(rank: int) -> dict[int, Connection]:
            connector = Connector(
                ranks.members[rank], ranks.members, EPOCH, ranks.listeners[rank], lambda peer: transport
            )
            deadline, made = Deadline(20), dict[int, Connection]()
            begun.wait()
            for peer in range(size):
                if peer != rank:
                    connector.dial(peer, deadline)
            while len(made) < size - 1 and not deadline.expired():
                connector.advance(0.01)
                taken = connector.take()
                assert not taken.keys() & made.keys(), "a second connection to the same rank"
                made |= taken
            return made

        check_each_reaches_each(in_threads(size, dial_all))


def test_a_rank_that_cannot_be_reached_is_dialled_again() -> None:
    with listening(2, TcpTransport("secret")) as ranks:
        ranks.listeners[1].close()
        connector = Connector(ranks.members[0], ranks.members, EPOCH, ranks.listeners[0], lambda peer: ranks.transport)
        connector.dial(1, Deadline(10))
        while not connector.unreached():
            connector.advance(0.01)
        assert [each.peer.rank for each in connector.unreached()] == [1]
        host, port = ranks.members[1].addresses[0].split(":")
        with socket.create_server((host, int(port))) as server:
            while connector.busy() and not connector.dialing():
                connector.advance(0.01)
            server.settimeout(10)
            server.accept()[0].close()
        connector.cancel(1)
        assert not connector.busy()


def test_a_rank_without_a_free_descriptor_connects_once_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is not to blame."""
    transport = TcpTransport("secret")
    offer = transport._offer

    def exhausted() -> Proposal:
        monkeypatch.setattr(transport, "_offer", offer)
        raise NoSharedMemoryError("cannot make shared memory") from OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(transport, "_offer", exhausted)
    with listening(2, transport) as ranks:
        deadline = Deadline(10)
        one, two = (
            Connector(ranks.members[rank], ranks.members, EPOCH, ranks.listeners[rank], lambda peer: transport)
            for rank in range(2)
        )
        one.dial(1, deadline)
        limits = 0
        while not (one.connections and two.connections):
            assert not deadline.expired()
            two.advance(0.01)
            try:
                one.advance(0.01)
            except DescriptorLimitError:
                limits += 1
        assert limits == 1
        assert one.failures == {}
        for connector in (one, two):
            connector.close()


@despite_pauses
@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_address_that_the_gateway_has_is_waited_for_and_connected_to(name: str, monkeypatch) -> None:
    """Also by the other rank, which does not know the address, or the instance, of the one that connects to it."""
    monkeypatch.setattr(connector_thread, "_FIND_SECONDS", 0.01)
    away, asked = threading.Event(), list[set[int]]()
    away.set()

    def find(wanted: Collection[int]) -> list[Member]:
        asked.append(set(wanted))
        if away.is_set():
            raise GatewayUnreachableError("the gateway at http://g does not answer")
        return [ranks.members[rank] for rank in wanted]

    with listening(3, transport_named(name)) as ranks:
        bare = [replace(member, instance="", addresses=[], http="") for member in ranks.members]
        tables = [[ranks.members[each] if each == rank else bare[each] for each in range(3)] for rank in range(3)]
        one, other = (
            Connector(ranks.members[rank], tables[rank], EPOCH, ranks.listeners[rank], lambda _: ranks.transport)
            for rank in (0, 1)
        )
        thread = ConnectorThread(one, lambda unreached: {}, find)
        engine = ProgressEngine(0, EPOCH, {}, eager_limit=1 << 16, dial=thread.dial, world_size=3)
        thread.serve(engine)
        try:
            with engine.lock:
                engine.connect([1, 2])
            wait_until(lambda: len(asked) > 2, "more attempts")
            why = "its address is not known, and the gateway at http://g does not answer"
            assert engine.unaddressed == {1: why, 2: why}
            away.clear()
            wait_until(lambda: other.advance(0.01) or 0 in other.connections, "the connection")
            wait_until(lambda: engine.is_connected(1), "the other end")
            assert engine.unaddressed == {}
            assert all(each <= {1, 2} for each in asked)
        finally:
            thread.close()
            engine.close()
            other.close()
