"""Clients without the token that attack the ports of a rank: silent, slow, and flooding ones at a bounded rate."""

from __future__ import annotations

import collections
import contextlib
import http.client
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankmesh_agent.wire.hello import Service, preface

A_SECOND = 200
"""Connections, or requests, that the clients begin in a second."""
_TICK_SECONDS = 0.005
_LATE_TICKS = 4
"""Ticks that are made up for, where the clients get too little of a processor: no burst follows a pause."""
_CPUCLOCK_SCHED = 2
"""In a clock's id (clock_getcpuclockid): the processor time of a process, its ended threads included."""
_HOST = b"Host: 127.0.0.1\r\n"
HEAD = b"GET /health HTTP/1.1\r\n" + _HOST
"""Half a head."""


class Kind(NamedTuple):
    """What clients do.

    Attributes:
        data: what each sends at once.
        held: connections that stay open; the oldest one is closed for each new one beyond these.
        trickles: whether one of them sends a byte more for each new one.
        http_only: whether they come to ports of HTTP alone.
    """

    data: bytes = b""
    held: int = 16
    trickles: bool = False
    http_only: bool = True


KINDS = {
    "silent": Kind(held=1000, http_only=False),
    "slow": Kind(HEAD, 200, trickles=True),
    "connections": Kind(http_only=False),
    "requests": Kind(HEAD + b"\r\n"),
    "guesses": Kind(b"GET /v1/store HTTP/1.1\r\n" + _HOST + b"Authorization: Bearer guess\r\n\r\n"),
    "clients of the store": Kind(preface(Service.STORE)),
    "clients of snapshots": Kind(preface(Service.SNAPSHOT)),
}


def attack(
    kind: Kind, ports: Sequence[int], is_over: Callable[[], bool], a_second: int = A_SECOND, *, made: Any
) -> None:
    """Attack ports of this host until it is over.

    Args:
        kind: what the clients do.
        ports: the ports, in turn.
        is_over: whether it is.
        a_second: connections a second.
        made: gets the number of connections, as ``value``.
    """
    held: collections.deque[socket.socket] = collections.deque()
    due, last = 0.0, time.monotonic()
    while not is_over():
        now = time.monotonic()
        due += min(now - last, _LATE_TICKS * _TICK_SECONDS) * a_second
        last = now
        while made.value < due:
            held.append(_connect(ports[made.value % len(ports)], kind.data))
            made.value += 1
            if len(held) > kind.held:
                held.popleft().close()
            if kind.trickles:
                held.rotate()
                with contextlib.suppress(OSError):
                    held[0].send(b"a")
        time.sleep(_TICK_SECONDS)
    for sock in held:
        sock.close()


def _connect(port: int, data: bytes) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # no connection, or no answer yet, is the victim's choice
        sock.connect_ex(("127.0.0.1", port))
        if data:
            sock.send(data)
    return sock


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    targets = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it is closed by now
            targets.append(os.readlink(entry.path))
    # A reading may miss a row while the sockets of others come and go.
    rows = [line.split() for _ in range(3) for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return [listening[target] for target in targets if target in listening]


def server_seconds(pid: int) -> float:
    """Return the processor seconds of all threads of a process but the main one: in a rank, mostly of its servers."""
    main = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED) - main / 1e9


def speaks_http(port: int, timeout: float) -> bool:
    """Return whether an HTTP server at a port answers in time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status in (200, 503)
        except (OSError, http.client.HTTPException):
            return False
