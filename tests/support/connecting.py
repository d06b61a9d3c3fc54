"""Both ends of connections, in one thread or two, and waits on what never waits itself."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.transports.base import Buffer, Connection
from rankmesh_agent.transports.tcp import PendingTcpConnection, TcpListener, TcpTransport

SECONDS = 10.0


def everyone(identity: bytes) -> bool:
    """Admit whoever knows the token."""
    return True


def meet(
    attempts: Sequence[PendingTcpConnection],
    listener: TcpListener | None = None,
    *,
    arrivals: int | None = None,
    seconds: float = SECONDS,
    admits: Callable[[bytes], bool] = everyone,
) -> tuple[list[Connection], list[tuple[bytes, Connection]]]:
    """Go on with attempts, and with a listener, until all attempts have their connection.

    Args:
        attempts: of any transport; closed if one of them fails.
        listener: where they come to, unless somebody else sees to that.
        arrivals: how many connections the listener is to have let in, as many as attempts unless said.
        seconds: how long that may take.
        admits: see TcpListener.accept.

    Returns:
        The connections of the attempts, in their order, and what the listener let in.

    Raises:
        TimeoutError: it takes too long.
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


def look(listener: TcpListener, admits: Callable[[bytes], bool] = everyone) -> list[tuple[bytes, Connection]]:
    """Let a listener do what it can do now; return what it lets in."""
    return listener.accept(listener.descriptors(), admits)


def connect(transport: TcpTransport, listener: TcpListener, identity: bytes = b"") -> tuple[Connection, Connection]:
    """Return both ends of a new connection, the connecting one first."""
    (connecting,), ((_, accepting),) = meet([transport.dial(listener.address, identity)], listener)
    return connecting, accepting


def dial(
    transport: TcpTransport, address: str, listener: TcpListener | None = None, seconds: float = SECONDS
) -> Connection:
    """Return a connection to an address where somebody else listens, or this thread at ``listener``, in vain."""
    (connection,), _ = meet([transport.dial(address)], listener, arrivals=0, seconds=seconds)
    return connection


def accept(listener: TcpListener, seconds: float = SECONDS) -> Connection:
    """Return the next connection that a listener lets in."""
    _, ((_, connection),) = meet([], listener, arrivals=1, seconds=seconds)
    return connection


def wait_ready(connection: Connection, deadline: Deadline, *, writing: bool) -> None:
    """Sleep until ``connection`` may have something to do, or for no reason: the caller tries again."""
    if deadline.expired():
        raise TimeoutError(f"no answer from {connection.peer} within {deadline.seconds:.1f} s")
    if not connection.prepare_wait(writing):
        return
    poller = select.poll()
    poller.register(connection.fileno(), connection.events(writing))
    if poller.poll(deadline.remaining() * 1000):
        connection.on_wakeup()


def send_all(connection: Connection, data: Buffer, deadline: Deadline) -> None:
    """Send all of ``data``, waiting for room."""
    view = memoryview(data)
    while view:
        sent = connection.send([view])
        view = view[sent:]
        if view and not sent:
            wait_ready(connection, deadline, writing=True)


def recv_exactly(connection: Connection, length: int, deadline: Deadline) -> bytes:
    """Return the next ``length`` bytes, waiting for them."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        view = view[received:]
        if view and not received:
            wait_ready(connection, deadline, writing=False)
    return bytes(data)
