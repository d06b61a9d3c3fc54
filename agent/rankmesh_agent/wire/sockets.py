"""Listening sockets, with errors that say who is in the way."""

from __future__ import annotations

import errno
import os
import socket

from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError


def bind(host: str, port: int, *, what: str) -> socket.socket:
    """Return a TCP socket that listens on ``host``:``port`` (0: any free port).

    Args:
        what: what is going to listen there, for the error message.

    Raises:
        AddressInUseError: somebody else listens there; the message names the process where /proc tells.
        DistNetworkError: the address is not this machine's, or cannot be resolved.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise DistNetworkError(f"{what}: cannot resolve {host!r}: {error.strerror}", address=host) from error
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
                f"{what}: {place} is in use{_holder(port)}; choose another MASTER_PORT (0 takes a free one with the "
                "launcher), or end the process that holds it",
                address=place,
            ) from error
        raise DistNetworkError(f"{what}: cannot listen on {place}: {error.strerror}", address=place) from error
    return listener


def url_of(listener: socket.socket, host: str | None = None) -> str:
    """Return the base URL of a listening socket, under another host name if one is given."""
    name, port = listener.getsockname()[:2]
    name = host or name
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


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
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(descriptor.path) in targets:
                    with open(f"/proc/{pid}/comm") as comm:
                        return f" by {comm.read().strip()} (pid {pid})"
        except OSError:
            continue
    return ""
