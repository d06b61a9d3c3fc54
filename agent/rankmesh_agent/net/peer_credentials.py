"""User id of the process at the other end of a connection over loopback or a unix socket, from the kernel.

Without a token, a server accepts the processes of its own user and of root alone. With one, a client sends it without
TLS to a listening socket of these users. The peer of a TCP connection is the owner of the socket with the same two
addresses, exchanged, in /proc/net/tcp. A socket that its process has closed has no owner: the kernel then reports inode
0, and user 0, which must not count as root.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator

from rankmesh_agent.net.descriptors import is_exhausted
from rankmesh_agent.net.rate_limit import WarningInterval
from rankmesh_agent.net.sockets import peer_closed
from rankmesh_agent.wire.errors import DistError, DistNetworkError

Endpoint = tuple[bytes, int]

_LOOKS = 5
"""Readings of the table, which may miss a row while others come and go, before a connection has no owner."""
_UCRED = struct.Struct("3i")
_IPV6_BYTES = 16
_MAPPED = bytes(10) + b"\xff\xff"
"""Start of an IPv6 address that stands for an IPv4 one."""
_LISTENERS_SECONDS = 1.0
"""Age up to which a reading of the table suffices to find a listening socket."""
_LISTENS = re.compile(" 0A | st ").search
"""Finds the state of a listening socket in a row, and the header."""
_tables: dict[tuple[str, bool], tuple[float, str]] = {}
"""When the last reading of a table of the kernel began, or of its listening sockets alone, and what it gave."""

_log = logging.getLogger("rankmesh")
_warning = WarningInterval()


class PeerRefusedError(DistNetworkError, code="other-user", status=403):
    """A process of another user has connected, and there is no token by which it could prove that it may."""


class PeerNotLocalError(PeerRefusedError):
    """The peer is no process of this host, as far as the kernel knows."""


class PeerClosedError(PeerRefusedError):
    """The peer has closed the connection: its user is unknown, and there is no client to refuse."""


def check_peer(sock: socket.socket, since: float | None = None) -> None:
    """Check that the peer of a connection is a process of this user or of root.

    Many connections share a reading of the table: one ``since`` they were accepted, by the monotonic clock, suffices.

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
    uid = _owner(sock, peer, own, since)
    if uid is None:
        text = f"no process of this host has the connection from {peer[0]} port {peer[1]} open"
        raise _refusal(text, PeerNotLocalError)
    _check_uid(uid)


def is_trusted_listener(host: str, port: int) -> bool:
    """Return whether a port of this host is one of this user or of root, so that a client may send it a credential."""
    if sys.platform != "linux":
        return False
    address, now = _packed(host), time.monotonic()
    wildcard = bytes(len(address))
    for since in (now - _LISTENERS_SECONDS, now, math.inf):  # a reading may miss a row, as of connections
        try:
            uids = [uid for bound in (address, wildcard) for uid in _users((bound, port), (wildcard, 0), since)]
        except OSError:
            return False
        if uids:
            return all(map(_is_trusted, uids))
    return False


def warn_refused(error: DistError) -> None:
    """Log that a connection was refused, unless it is closed, at most once a minute in this process."""
    if not isinstance(error, PeerClosedError) and _warning.is_due():
        _log.warning("refused a connection: %s", error.message)


def _is_trusted(uid: int) -> bool:
    try:
        _check_uid(uid)
    except PeerRefusedError:
        return False
    return True


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


def _owner(sock: socket.socket, peer: tuple[str, int], own: tuple[str, int], since: float | None) -> int | None:
    """Return the user of the process that has the other end of a connection open; None if no process has."""
    ends = (_packed(peer[0]), peer[1]), (_packed(own[0]), own[1])
    for _ in range(_LOOKS):
        since, begin = None, time.monotonic() if since is None else since
        try:
            uid = next(_users(*ends, begin), None)
        except OSError as error:
            if is_exhausted(error):
                raise
            raise _refusal(f"cannot determine the user of the process at port {peer[1]} ({error})") from error
        if uid is not None:
            return uid
        if peer_closed(sock):  # no further look: a busy server with a long table would serve no other client
            raise PeerClosedError("the client has closed the connection")
    return None


def _users(near: Endpoint, far: Endpoint, since: float) -> Iterator[int]:
    """Yield the users of the open sockets with an address of their own and one of their peer: zeros, if they listen."""
    if len(near[0]) != _IPV6_BYTES:
        yield from _look_up_in("/proc/net/tcp", f" {_row(near)} {_row(far)} ", since)
    with contextlib.suppress(FileNotFoundError):  # this host has no IPv6
        yield from _look_up_in("/proc/net/tcp6", f" {_row(_as_ipv6(near))} {_row(_as_ipv6(far))} ", since)


def _look_up_in(path: str, pair: str, since: float) -> Iterator[int]:
    table = _read(path, since, listening=pair.endswith(":0000 "))
    at = table.find(pair)
    while at >= 0:
        _, _, _, _, _, _, uid, _, inode, *_ = table[at : table.find("\n", at)].split()
        if int(inode):
            yield int(uid)
        at = table.find(pair, at + 1)


def _read(path: str, since: float, *, listening: bool) -> str:
    """Return a table, or its first part: the listening sockets, before thousands of connections that take 10 ms."""
    read, table = _tables.get((path, listening), (-math.inf, ""))
    if read < since:
        read = time.monotonic()
        with open(path) as file:
            table = "".join(itertools.takewhile(_LISTENS, file)) if listening else file.read()
        _tables[path, listening] = read, table
    return table


def _packed(host: str) -> bytes:
    """Return the bytes of a numeric address, 4 of one that is mapped from IPv4."""
    if ":" not in host:
        return socket.inet_aton(host)
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0]).removeprefix(_MAPPED)


def _as_ipv6(end: Endpoint) -> Endpoint:
    """Return an address as sockets of IPv6 have it: zeros stand for any address there, too."""
    address, port = end
    if len(address) != _IPV6_BYTES:
        address = _MAPPED + address if any(address) else bytes(_IPV6_BYTES)
    return address, port


def _row(end: Endpoint) -> str:
    """Return an address as in /proc/net/tcp: 32-bit words of the machine's byte order, and the port."""
    address, port = end
    words = len(address) // 4
    return "%08X" * words % struct.unpack(f"={words}I", address) + f":{port:04X}"
