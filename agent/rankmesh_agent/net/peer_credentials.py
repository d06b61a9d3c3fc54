"""User id of the process at the other end of a connection over loopback or a unix socket, from the kernel.

Without a token, a server accepts the processes of its own user and of root alone. The peer of a unix socket is in
SO_PEERCRED. The peer of a TCP connection is the owner of the socket with the same two addresses, exchanged, in
/proc/net/tcp. A socket that its process has closed has no owner: the kernel then reports inode 0, and user 0, which
must not count as root.

With a token, a client sends it without TLS within its host, after it has looked up the user of the listening socket.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

from rankmesh_agent.net.descriptors import is_exhausted
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.errors import DistError, DistNetworkError

Endpoint = tuple[str, int]
"""Numeric IP address, and port."""

_LOOKS = 5
"""Readings of the table, which may miss a row while others come and go, before a connection has no owner."""
_UCRED = struct.Struct("3i")
_WARN_SECONDS = 60.0
_IPV6_BYTES = 16
_MAPPED = bytes(10) + b"\xff\xff"
"""Start of an IPv6 address that stands for an IPv4 one."""

_LISTENS = " 0A "
"""The state of a listening socket, as a column of the table."""
_LISTENERS_SECONDS = 1.0
"""Lifetime of the table of listening sockets; a port that it does not have is looked up again."""
_listeners: tuple[float, dict[int, list[tuple[str, int]]]] = (float("-inf"), {})

_tables: dict[str, tuple[float, str]] = {}
"""The last reading of each table of connections, and when it began."""

_log = logging.getLogger("rankmesh")
_warn_at = 0.0


class PeerRefusedError(DistNetworkError):
    """A process of another user has connected, and there is no token by which it could prove that it may."""

    code = "other-user"
    status = 403


class PeerNotLocalError(PeerRefusedError):
    """The peer is no process of this host, as far as the kernel knows."""


class PeerClosedError(PeerRefusedError):
    """The peer has closed the connection: its user is unknown, and there is no client to refuse."""


def check_peer(sock: socket.socket, since: float | None = None) -> None:
    """Check that the peer of a connection is a process of this user or of root.

    Args:
        sock: the connection.
        since: when it was accepted, by the monotonic clock: a reading of the table since then suffices, so that many
            connections share one. None for a new reading.

    Raises:
        PeerRefusedError: it is not, or that cannot be determined.
        OSError: there is no free descriptor for the query.
    """
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        _check_uid(uid)
        return
    try:
        peer, own = sock.getpeername()[:2], sock.getsockname()[:2]
    except OSError as error:
        raise PeerClosedError("the connection is closed") from error
    try:
        check_tcp_peer(peer, own, lambda: _is_closed(sock), since)
    except PeerRefusedError:
        if _is_closed(sock):
            raise PeerClosedError("the client has closed the connection") from None
        raise


def check_tcp_peer(
    peer: Endpoint, own: Endpoint, is_closed: Callable[[], bool] = lambda: False, since: float | None = None
) -> None:
    """Check that the peer of an open TCP connection is a process of this user or of root; see ``check_peer``.

    Args:
        peer: the peer's end of the connection.
        own: this end.
        is_closed: returns whether the peer has closed it.
        since: see ``check_peer``.
    """
    try:
        uid = _owner(peer, own, is_closed, since)
    except OSError as error:
        if is_exhausted(error):
            raise
        raise _refusal(f"cannot determine the user of the process at port {peer[1]} ({error})") from error
    if uid is None:
        text = f"no process of this host has the connection from {peer[0]} port {peer[1]} open"
        raise _refusal(text, PeerNotLocalError)
    _check_uid(uid)


def is_trusted_listener(host: str, port: int) -> bool:
    """Return whether a port of this host is one of this user or of root, so that a client may send it a credential.

    Args:
        host: numeric address.
        port: the port.
    """
    global _listeners
    if sys.platform != "linux":
        return False
    address = _packed(host)
    whole = address if len(address) == _IPV6_BYTES else _MAPPED + address
    bound = {_words(each) for each in (address, whole, bytes(len(address)), bytes(_IPV6_BYTES))}
    began = time.monotonic()
    while True:
        read, rows = _listeners
        found = [uid for each, uid in rows.get(port, ()) if each in bound] if began - read < _LISTENERS_SECONDS else []
        if found or read >= began:
            return bool(found) and all(map(_is_trusted, found))
        _listeners = time.monotonic(), _read_listeners()


def _read_listeners() -> dict[int, list[tuple[str, int]]]:
    """Return the listening sockets of this host by port: the address of each, as the table has it, and its user."""
    found: dict[int, list[tuple[str, int]]] = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6") * 2:  # a reading may miss a row, as of connections
        with contextlib.suppress(OSError), open(path) as table:  # another system, or without IPv6
            next(table, None)  # the header; then come the listening sockets, before thousands of connections
            for row in map(str.split, itertools.takewhile(lambda line: _LISTENS in line, table)):
                address, _, port = row[1].partition(":")
                found.setdefault(int(port, 16), []).append((address, int(row[7])))
    return found


def _is_trusted(uid: int) -> bool:
    try:
        _check_uid(uid)
    except PeerRefusedError:
        return False
    return True


def admit_peer(sock: socket.socket, token: str | Credentials) -> bool:
    """Return whether a peer may begin the handshake; a job's token decides about the rest.

    Raises:
        OSError: there is no free descriptor for the query.
    """
    try:
        if not token:
            check_peer(sock)
    except PeerRefusedError as error:
        warn_refused(error)
        return False
    return True


def warn_refused(error: DistError) -> None:
    """Log that a connection was refused, unless it is closed, at most once a minute in this process."""
    global _warn_at
    now = time.monotonic()
    if now >= _warn_at and not isinstance(error, PeerClosedError):
        _warn_at = now + _WARN_SECONDS
        _log.warning("refused a connection: %s", error.message)


def _is_closed(sock: socket.socket) -> bool:
    """Return whether the peer has closed the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _check_uid(uid: int) -> None:
    own = os.geteuid()
    if uid not in (own, 0):
        raise _refusal(f"the process is of user {uid}, this one of user {own}")
    if uid and uid == _unmapped_uid():
        raise _refusal(f"user {uid} stands for all users whom this user namespace does not map")


def _refusal(reason: str, kind: type[PeerRefusedError] = PeerRefusedError) -> PeerRefusedError:
    return kind(
        f"{reason}; without a token, only processes of the same user and root are served. Set RANKMESH_TOKEN to the "
        "same secret on every rank and client (for example the output of 'openssl rand -hex 32')"
    )


def _unmapped_uid() -> int | None:
    """Return the id that the kernel reports for users whom the user namespace does not map, None if it maps all."""
    try:
        with open("/proc/self/uid_map") as ranges, open("/proc/sys/kernel/overflowuid") as unmapped:
            maps_all = ranges.read().split() == ["0", "0", "4294967295"]
            return None if maps_all else int(unmapped.read())
    except (OSError, ValueError):
        return None


def _owner(peer: Endpoint, own: Endpoint, is_closed: Callable[[], bool], since: float | None) -> int | None:
    """Return the user id of the process that has a socket open; None if no process has.

    A closed socket is looked up once: a server that looked longer for clients without patience would serve no other
    one where the machine is busy and its table long.

    Args:
        peer: the socket's own address.
        own: the address of its peer.
        is_closed: returns whether it has been closed.
        since: see ``check_peer``.

    Raises:
        OSError: the table cannot be read.
    """
    near, far = _packed(peer[0]), _packed(own[0])
    for _ in range(_LOOKS):
        since, wanted = None, time.monotonic() if since is None else since
        if len(near) != _IPV6_BYTES:
            uid = _look_up_in("/proc/net/tcp", wanted, (near, far), peer[1], own[1])
            if uid is not None:
                return uid
        with contextlib.suppress(FileNotFoundError):  # this host has no IPv6
            addresses = (near, far) if len(near) == _IPV6_BYTES else (_MAPPED + near, _MAPPED + far)
            uid = _look_up_in("/proc/net/tcp6", wanted, addresses, peer[1], own[1])
            if uid is not None:
                return uid
        if is_closed():
            break
    return None


def _look_up_in(path: str, since: float, addresses: tuple[bytes, bytes], *ports: int) -> int | None:
    near, far = (f"{_words(address)}:{port:04X}" for address, port in zip(addresses, ports, strict=True))
    read, table = _tables.get(path, (float("-inf"), ""))
    if read < since:
        read = time.monotonic()
        with open(path) as file:
            table = file.read()  # the kernel takes 10 ms for some thousand lines, most of connections that have ended
        _tables[path] = read, table
    at = table.find(pair := f" {near} {far} ")
    while at >= 0:
        _, _, _, _, _, _, uid, _, inode, *_ = table[at : table.find("\n", at)].split()
        if int(inode):
            return int(uid)
        at = table.find(pair, at + 1)
    return None


def _packed(host: str) -> bytes:
    """Return the bytes of a numeric address, 4 of one that is mapped from IPv4."""
    if ":" not in host:
        return socket.inet_aton(host)
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0]).removeprefix(_MAPPED)


def _words(address: bytes) -> str:
    """Return an address as in /proc/net/tcp: 32-bit words of the machine's byte order."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(address) // 4}I", address))
