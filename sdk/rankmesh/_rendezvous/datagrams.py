"""Authenticated datagrams of the multicast rendezvous, and the socket that sends and receives them.

A datagram is ``MAGIC``, the version, a SHA-256 HMAC of the rest under the job's token, and JSON. A datagram that is too
large, of another version, not authentic or malformed is dropped without an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rankmesh_agent.config.addresses import is_loopback
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistNetworkError

MAX_BYTES = 1200
"""Largest datagram: fits into one packet on any network."""
_MAGIC = b"RankMesh"
_VERSION = 1
_HEADER = struct.Struct("!8sB32s")
_MAX_TEXT = 512
_IP_MULTICAST_ALL, _IPV6_MULTICAST_ALL = 49, 29  # <linux/in.h>, <linux/in6.h>; Python has no names for them

Kind = Literal["ask", "here"]


@dataclass(frozen=True)
class Datagram:
    """A query or an announcement.

    Attributes:
        kind: ``ask`` queries the gateway of a job, ``here`` announces it.
        job: digest of the job's name, see ``job_digest``.
        sender: random name of the sender; the lowest name hosts.
        to: name of the process whose query this answers, empty for an announcement.
        url: the gateway's base URL.
        id: the id in the gateway's ``/health``.
    """

    kind: Kind
    job: str
    sender: str
    to: str = ""
    url: str = ""
    id: str = ""


def job_digest(job: str) -> str:
    """Return a fixed-length digest of a job's name."""
    return hashlib.blake2b(job.encode(), digest_size=16).hexdigest()


def encode(message: Datagram, token: str) -> bytes:
    """Return the datagram of a message."""
    body = json.dumps(asdict(message)).encode()
    return _HEADER.pack(_MAGIC, _VERSION, _mac(body, token)) + body


def decode(datagram: bytes, token: str) -> Datagram | None:
    """Parse a datagram; None if it is not one of the job's.

    Without a token the sender is not authenticated: then only addresses of this machine are accepted.
    """
    if not _HEADER.size < len(datagram) <= MAX_BYTES:
        return None
    magic, version, seal = _HEADER.unpack_from(datagram)
    body = datagram[_HEADER.size :]
    if (magic, version) != (_MAGIC, _VERSION) or not hmac.compare_digest(seal, _mac(body, token)):
        return None
    try:
        message = Datagram(**json_text.loads(body))
    except (ValueError, TypeError):
        return None
    if message.kind not in get_args(Kind):
        return None
    if not all(isinstance(text, str) and len(text) <= _MAX_TEXT for text in asdict(message).values()):
        return None
    if not token and message.url and not _is_local(message.url):
        return None
    return message


def _is_local(url: str) -> bool:
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition(":")[0]
    return scheme in ("http", "https") and is_loopback(host)


def _mac(body: bytes, token: str) -> bytes:
    return hmac.digest(token.encode(), _MAGIC + bytes([_VERSION]) + body, "sha256")


class MulticastSocket:
    """A member socket of a multicast group. Datagrams stay within the local network (one hop) and loop back locally.

    Args:
        group: multicast address; an IPv6 one may name its interface, ``ff12::1%eth0``.
        port: port of the group.
        near: local address that selects the interface, if none is named.
        interface: name of the interface.
        token: the job's token.

    Raises:
        DistNetworkError: the interface does not support multicast.
    """

    def __init__(self, group: str, port: int, near: str, token: str, interface: str | None = None) -> None:
        self._token = token
        self._what = f"multicast group {group}, port {port}, from {interface or near}"
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(group, port, type=socket.SOCK_DGRAM)[0]
            self._socket = close_in_children(socket.socket(family, kind, protocol))
        except OSError as error:
            raise self._failed("use", error) from error
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            index = 0 if interface is None else socket.if_nametoindex(interface)
            join = self._join_ipv6 if family == socket.AF_INET6 else self._join_ipv4
            self._address: tuple[Any, ...] = join(address, near, index)
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise self._failed("join", error) from error
            raise

    def send(self, message: Datagram) -> None:
        """Send a datagram to the group.

        Raises:
            DistNetworkError: there is no route to the group.
        """
        try:
            self._socket.sendto(encode(message, self._token), self._address)
        except OSError as error:
            raise self._failed("send to", error) from error

    def receive(self, seconds: float) -> Iterator[Datagram]:
        """Yield the job's datagrams that arrive within ``seconds``."""
        deadline = Deadline(seconds)
        while (left := deadline.remaining()) > 0:
            self._socket.settimeout(left)
            try:
                datagram = self._socket.recv(MAX_BYTES + 1)
            except TimeoutError:
                return
            except OSError as error:
                raise self._failed("receive from", error) from error
            message = decode(datagram, self._token)
            if message is not None:
                yield message

    def close(self) -> None:
        """Leave the group."""
        self._socket.close()

    def _join_ipv4(self, address: tuple[Any, ...], near: str, index: int) -> tuple[Any, ...]:
        # The kernel finds an interface by an IPv4 address; for an IPv6 address the index is looked up.
        local = bytes(4)
        if index == 0 and _version(near) == 4:
            local = socket.inet_aton(near)
        elif index == 0:
            index = interface_of(near)
        interface = struct.pack("=4s4si", socket.inet_aton(address[0]), local, index)
        self._socket.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)  # receive from that interface alone
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
        self._socket.bind(address)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, interface)
        return address

    def _join_ipv6(self, address: tuple[Any, ...], near: str, index: int) -> tuple[Any, ...]:
        host, port, flow, scope = address
        index = scope or index or interface_of(near)
        group = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        self._socket.setsockopt(socket.IPPROTO_IPV6, _IPV6_MULTICAST_ALL, 0)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        self._socket.bind((host, port, flow, index))
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + struct.pack("=I", index))
        return host, port, flow, index

    def _failed(self, what: str, error: OSError) -> DistNetworkError:
        return DistNetworkError(
            f"cannot {what} {self._what}: {error.strerror or error}. Set RANKMESH_BIND to an address, or "
            "GLOO_SOCKET_IFNAME to the name, of a network interface that carries multicast; or give the address of one "
            "host, tcp://host:port"
        )


def interface_of(address: str) -> int:
    """Return the index of the interface with an address, 0 (chosen by the kernel) if there is none."""
    if is_loopback(address):
        return socket.if_nametoindex("lo")
    if _version(address) != 6:
        return 0
    wanted = ipaddress.IPv6Address(address).packed.hex()
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            there, index, *_ = line.split()
            if there == wanted:
                return int(index, 16)
    return 0


def _version(address: str) -> int:
    """Return 4 or 6, or 0 if the text is not an address."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return 0
