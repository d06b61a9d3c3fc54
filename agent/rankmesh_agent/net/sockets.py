"""Addresses and listening sockets of this machine; errors name the process that holds a port."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import sys
from typing import NamedTuple

from rankmesh_agent.config.addresses import is_loopback
from rankmesh_agent.config.tls import client_scheme, server_scheme
from rankmesh_agent.net.descriptors import convert_emfile, raise_if_exhausted
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError

if sys.platform != "win32":
    import fcntl

_SIOCGIFADDR = 0x8915
AF_UNIX = getattr(socket, "AF_UNIX", None)
"""The family of unix sockets; Windows has none."""
_LAST_PORT = 65535
BACKLOG = 4096
"""Maximum number of clients that wait to be accepted: net.core.somaxconn's default, beyond which connects are lost."""
_TCP_INFO = struct.Struct("=2xBB52xI")
"""Of struct tcp_info (linux/tcp.h): tcpi_retransmits, tcpi_probes, and tcpi_last_ack_recv in milliseconds."""


class Interface(NamedTuple):
    """A network interface and its IPv4 address."""

    name: str
    address: str


def bind(host: str, port: int, *, purpose: str) -> socket.socket:
    """Return a TCP socket that listens on ``host``:``port`` (0: any free port); errors begin with the purpose.

    Raises:
        AddressInUseError: another process listens there; the error names it if /proc shows it.
        DistNetworkError: the address does not belong to this machine, or cannot be resolved.
    """
    if not 0 <= port <= _LAST_PORT:  # the C library takes it modulo 65536
        raise DistNetworkError(f"{purpose}, but {port} is not a port: it must be between 0 and {_LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DistNetworkError(f"{purpose}, but cannot resolve {host!r}: {why}", address=host) from error
    with convert_emfile(purpose):
        listener = close_in_children(socket.socket(family, kind, protocol))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        endpoint = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"{purpose}, but {endpoint} is in use{_listening_process(port)}; choose another port, or end the "
                "process that holds it",
                address=endpoint,
            ) from error
        raise DistNetworkError(f"{purpose}, but cannot use {endpoint}: {error.strerror}", address=endpoint) from error
    return listener


def listen_unix() -> tuple[socket.socket, str]:
    """Return a listening unix socket and its random abstract name, in no directory and gone with the socket."""
    name = f"rankmesh-{secrets.token_hex(16)}"
    listener = close_in_children(socket.socket(socket.AF_UNIX))
    listener.bind(f"\0{name}")
    listener.listen(BACKLOG)
    return listener, name


def url_for(host: str, port: int, scheme: str = "") -> str:
    """Return the base URL of a host and port; with TLS, unless the scheme is given, if this process uses it."""
    scheme = scheme or client_scheme()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def url_of(listener: socket.socket) -> str:
    """Return the base URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return url_for(host, port, server_scheme())


def _listening_process(port: int) -> str:
    """Return ' by NAME (pid N)' for the process that listens on a port, '' if /proc does not show it."""
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


def configure_connection(sock: socket.socket) -> None:
    """Have a connection send short messages at once, and end within half a minute after the peer's host has gone."""
    if sock.family == AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 3), ("USER_TIMEOUT", 25_000)):
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:  # of Linux; other systems lack some
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def probe_idle_peer(sock: socket.socket) -> None:
    """Make the kernel send keepalive probes to the peer of an idle connection, for ``silent_seconds``.

    Without TCP_USER_TIMEOUT: it would end a connection whose receiver reads nothing while it computes for a long time.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def silent_seconds(sock: socket.socket) -> float:
    """Return the seconds since the peer's kernel last acknowledged a packet, 0.0 if no packet is unacknowledged.

    Unacknowledged packets are retransmitted data, window probes, and keepalive probes.
    """
    retransmits, probes, last_ack = _TCP_INFO.unpack(
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    )
    return last_ack / 1000 if retransmits or probes else 0.0


def address_towards(host: str, port: int) -> str:
    """Return the source address of packets to ``host``, and send none; raise DistNetworkError without a route."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise_if_exhausted(error, f"cannot find a route to {host}")
        raise DistNetworkError(f"cannot find a route to {host}: {error.strerror}", address=host) from error


def interface_for(pattern: str, near: str = "") -> Interface:
    """Return a network interface that a pattern allows: the one with an address if it is among them, else the first.

    Args:
        pattern: in the syntax of NCCL_SOCKET_IFNAME: prefixes of names, separated by commas; a ``=`` in front stands
            for whole names, a ``^`` for all other interfaces (loopback and Docker's if there are no others).
        near: the preferred address.

    Raises:
        DistNetworkError: none of the interfaces with an IPv4 address does; the error lists them.
    """
    there = interfaces()
    rest = pattern.removeprefix("^")
    names = [name.strip() for name in rest.removeprefix("=").split(",") if name.strip()]

    def matches(interface: Interface, name: str) -> bool:
        return interface.name == name if rest.startswith("=") else interface.name.startswith(name)

    if pattern.startswith("^"):
        allowed = [each for each in there if not any(matches(each, name) for name in names)]
        allowed.sort(key=lambda each: each.name.startswith(("lo", "docker")))
    else:
        allowed = [each for name in names for each in there if matches(each, name)]
    if not allowed:
        listed = ", ".join(f"{each.name} ({each.address})" for each in there)
        raise DistNetworkError(
            f"GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, {pattern!r} in NCCL's syntax, allows none of the network "
            f"interfaces with an IPv4 address: {listed or 'there is none'}"
        )
    return next((each for each in allowed if each.address == near), allowed[0])


def interfaces() -> list[Interface]:
    """Return the network interfaces with an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return found


def reachable_addresses(host: str, advertised: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the addresses to advertise for a socket bound to ``host``, and the host names accepted in requests.

    Peers cannot connect to a wildcard address: its substitutes are this machine's name and the addresses of that name.
    """
    name = socket.gethostname()
    if advertised:
        return list(advertised), [name, *advertised]
    if host not in ("0.0.0.0", "::", ""):
        return [host], [name, host]
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    return [*sorted(addresses), name], [name]


def peer_closed(sock: socket.socket) -> bool:
    """Return whether the peer has closed a connection, whatever has come before. Does not block. For Linux."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def is_ready(sock: socket.socket, seconds: float, *, writing: bool = False) -> bool:
    """Return whether a socket is readable, or writable, within a time."""
    if not hasattr(select, "poll"):  # Windows, whose select has no limit of the descriptor's number
        return any(select.select([] if writing else [sock], [sock] if writing else [], [], seconds))
    poll = select.poll()
    poll.register(sock, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def peer_name(sock: socket.socket) -> str:
    """Return the address of the other end of a connection, for the log."""
    try:
        address = sock.getpeername()
    except OSError:
        return "a peer that has gone"
    return str(address[0]) if isinstance(address, tuple) else "this host"


def is_beyond_host(sock: socket.socket, peer_host: str) -> bool:
    """Return whether a connection leaves this host: not if both ends have the same address, or loopback addresses.

    Of an attempt to connect, too: ``peer_host`` is the numeric address of the peer.
    """
    own = str(sock.getsockname()[0])
    return own != peer_host and not (is_loopback(own) and is_loopback(peer_host))
