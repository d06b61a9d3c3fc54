"""Both ends of connections in one thread or two, and blocking calls on connections that do not block."""

from __future__ import annotations

import select
from collections.abc import Callable, Collection, Sequence

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.connector import Connector
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.transports.base import Buffer, Connection
from rankmesh_agent.transports.tcp import PendingTcpConnection, TcpListener, TcpTransport
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import Member

SECONDS = 10.0
Admits = Callable[[bytes], bool]


def admit_all(identity: bytes) -> bool:
    """Admit every client that knows the token."""
    return True


class NoGateway:
    """A gateway that knows nothing of the ranks; see connector.Membership."""

    def raise_if_left(self) -> bool:
        return True

    def ended(self, unreached: Collection[int]) -> dict[int, Goodbye]:
        return {}

    def find_members(self, ranks: Collection[int]) -> list[Member]:
        return []


def connect_all(
    engine: ProgressEngine,
    members: Sequence[Member],
    listener: TcpListener,
    transport: TcpTransport,
    deadline: Deadline | None = None,
) -> None:
    """Connect an engine to all other ranks, as a join does."""
    (me,) = (member for member in members if member.rank == engine.rank)
    connector = Connector(me, members, engine.epoch, listener, lambda peer: transport, NoGateway())
    others = [member.rank for member in members if member is not me]
    try:
        connector.connect(engine, others, deadline or Deadline(60))
    finally:
        connector.close()


def meet(
    attempts: Sequence[PendingTcpConnection],
    listener: TcpListener | None = None,
    *,
    arrivals: int | None = None,
    seconds: float = SECONDS,
    admits: Admits = admit_all,
) -> tuple[list[Connection], list[tuple[bytes, Connection]]]:
    """Continue attempts and a listener; return the connections of the attempts, and those that the listener accepts.

    Args:
        attempts: closed if one of them fails.
        listener: the listener, None if another thread serves it.
        arrivals: number of connections to accept; as many as attempts by default.
        seconds: time limit.
        admits: see TcpListener.accept.

    Raises:
        TimeoutError: the time limit has passed.
        DistNetworkError: an attempt failed.
    """
    made: dict[int, Connection] = {}
    arrived: list[tuple[bytes, Connection]] = []
    expected = (len(attempts) if listener else 0) if arrivals is None else arrivals
    deadline = Deadline(seconds)
    try:
        while len(made) < len(attempts) or len(arrived) < expected:
            poll = select.poll()
            if listener is not None:
                arrived += look(listener, admits)
                for fd in listener.descriptors():
                    poll.register(fd, select.POLLIN)
            for number, attempt in enumerate(attempts):
                if number not in made:
                    connection = attempt.advance()
                    if connection is None:
                        poll.register(attempt.fileno(), attempt.events())
                    else:
                        made[number] = connection
            if deadline.expired():
                raise TimeoutError(f"{len(made)} of {len(attempts)} connected, {len(arrived)} arrived")
            if len(made) < len(attempts) or len(arrived) < expected:
                poll.poll(min(50.0, 1000 * deadline.remaining()))
    except BaseException:
        for number, attempt in enumerate(attempts):
            made.get(number, attempt).close()
        for _, connection in arrived:
            connection.close()
        raise
    return [made[number] for number in range(len(attempts))], arrived


def look(listener: TcpListener, admits: Admits = admit_all) -> list[tuple[bytes, Connection]]:
    """Continue a listener's handshakes as far as possible; return the connections that are ready."""
    return listener.accept(listener.descriptors(), admits)


def connect(transport: TcpTransport, listener: TcpListener) -> tuple[Connection, Connection]:
    """Return both ends of a new connection, the client's first."""
    (connecting,), ((_, accepting),) = meet([transport.dial(listener.address)], listener)
    return connecting, accepting


def dial(
    transport: TcpTransport, address: str, listener: TcpListener | None = None, seconds: float = SECONDS
) -> Connection:
    """Return a connection to a listener of another thread, or to ``listener``, which this thread serves meanwhile."""
    (connection,), _ = meet([transport.dial(address)], listener, arrivals=0, seconds=seconds)
    return connection


def wait_ready(connection: Connection, deadline: Deadline, *, writing: bool) -> None:
    """Sleep until bytes can perhaps be moved."""
    if deadline.expired():
        raise TimeoutError(f"no answer from {connection.peer} within {deadline.seconds:.1f} s")
    if connection.prepare_wait(writing):
        poller = select.poll()
        poller.register(connection.fileno(), connection.events(writing))
        if poller.poll(deadline.remaining() * 1000):
            connection.on_wakeup()


def send_all(connection: Connection, data: Buffer, deadline: Deadline) -> None:
    """Send all of ``data``."""
    view = memoryview(data)
    while view:
        sent = connection.send([view])
        view = view[sent:]
        if view and not sent:
            wait_ready(connection, deadline, writing=True)


def recv_exactly(connection: Connection, length: int, deadline: Deadline) -> bytes:
    """Return the next ``length`` bytes."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        view = view[received:]
        if view and not received:
            wait_ready(connection, deadline, writing=False)
    return bytes(data)
