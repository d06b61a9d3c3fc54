"""This machine's addresses and listening sockets, with errors that say who is in the way."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError

_SIOCGIFADDR = 0x8915
_LAST_PORT = 65535
_TCP_INFO = struct.Struct("=2xBB52xI")
"""Of struct tcp_info (linux/tcp.h): tcpi_retransmits, tcpi_probes, and tcpi_last_ack_recv in milliseconds."""


def bind(host: str, port: int, *, purpose: str) -> socket.socket:
    """Return a TCP socket that listens on ``host``:``port`` (0: any free port).

    Args:
        what: who wants to listen there, for the error message: ``"the agent listens"``.

    Raises:
        AddressInUseError: somebody else listens there; the message names the process where /proc tells.
        DistNetworkError: the address is not this machine's, or cannot be resolved.
    """
    if not 0 <= port <= _LAST_PORT:  # the C library would take it modulo 65536
        raise DistNetworkError(f"{purpose}, but {port} is not a port: it must be between 0 and {_LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DistNetworkError(f"{purpose}, but cannot resolve {host!r}: {why}", address=host) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        place = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"{purpose}, but {place} is in use{_holder(port)}; choose another port, or end the process that "
                "holds it",
                address=place,
            ) from error
        raise DistNetworkError(f"{purpose}, but cannot use {place}: {error.strerror}", address=place) from error
    return listener


def url_for(host: str, port: int) -> str:
    """Return the base URL of a host and port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def url_of(listener: socket.socket, host: str | None = None) -> str:
    """Return the base URL of a listening socket, under another host name if one is given."""
    name, port = listener.getsockname()[:2]
    return url_for(host or name, port)


def _holder(port: int) -> str:
    """Return ' by NAME (pid N)' for the process that listens on a port, or '' where we may not look."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines.readlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    targets = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc")) if targets else ():
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in targets:
                    with open(f"/proc/{pid}/comm") as comm:
                        return f" by {comm.read().strip()} (pid {pid})"
        except OSError:
            continue
    return ""


def break_when_peer_vanishes(sock: socket.socket) -> None:
    """Have a connection break within half a minute when the host at the other end vanishes without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def probe_idle_peer(sock: socket.socket) -> None:
    """Have the kernel ask an idle connection's other end for a sign of life, for ``silence`` to tell.

    There is no TCP_USER_TIMEOUT as in ``notice_vanished_peer``: it would break a connection whose receiver lives, but
    computes for long and reads nothing meanwhile.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def silent_seconds(sock: socket.socket) -> float:
    """Return how many seconds ago the other end's kernel last acknowledged anything, 0.0 if nothing waits for that.

    What waits is data sent again and again, a question for room, or one for a sign of life.
    """
    retransmits, probes, last_ack = _TCP_INFO.unpack(
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    )
    return last_ack / 1000 if retransmits or probes else 0.0


def address_towards(host: str, port: int) -> str:
    """Return this machine's address from which packets to ``host`` leave; nothing is sent.

    Raises:
        DistNetworkError: the name cannot be resolved, or there is no route.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DistNetworkError(f"cannot find a way to {host}: {error.strerror}", address=host) from error


def address_of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        DistNetworkError: there is no such interface, or it has no address; names those there are.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            there = ", ".join(interface for _, interface in socket.if_nameindex())
            raise DistNetworkError(
                f"network interface {name!r} (from GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME) has no IPv4 address: "
                f"{error.strerror}; there are {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def reachable_addresses(host: str, advertised: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the addresses peers are told for a socket bound to ``host``, and the names we may be asked under.

    A wildcard address is not one to connect to: then it is this machine's name and what that resolves to.
    """
    name = socket.gethostname()
    if advertised:
        return list(advertised), [name, *advertised]
    if host not in ("0.0.0.0", "::", ""):
        return [host], [name, host]
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    return [*sorted(found), name], [name]
