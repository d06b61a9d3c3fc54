"""``tcp://239.…:port`` and ``tcp://[ff15:…]:port``: processes query a multicast group for the gateway's address.

A process repeats its query until a host answers. Rank 0 hosts the gateway as soon as no answer arrives. Of the
processes without a rank, the one with the lowest random name among the queries hosts, after an election period. If two
processes host nevertheless, because datagrams were lost, each receives the other's announcements, and the one with the
higher name steps down; its joiners are rejected and find the other gateway.

A datagram is ``_MAGIC``, the version, a SHA-256 HMAC of the rest under the token, and JSON. One that is too large,
of another version, not authentic or malformed is dropped without an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh._rendezvous.locator import GatewayLocator
from rankmesh_agent.config.addresses import is_loopback
from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.sockets import address_towards, interface_for
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import UNASSIGNED

ASK_SECONDS = 0.1
"""Wait for an answer before the next query."""
ELECTION_SECONDS = 1.0
"""Processes without a rank listen for each other this long before one of them hosts."""
ANNOUNCE_SECONDS = 0.5
"""Interval of a host's announcements until its world is complete."""
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
        sender: random name of the sender; the lowest name hosts.
        to: name of the process whose query this answers, empty for an announcement.
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
        """Send a datagram to the group."""
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


class MulticastLocator(GatewayLocator):
    """Rank 0, or one of the processes without a rank, hosts the gateway and announces it in a multicast group."""

    def __init__(self, group: str, port: int, rank: int, settings: Settings) -> None:
        near = settings.bind or address_towards(group, port)
        interface = None
        if settings.interface is not None:
            interface, address = interface_for(settings.interface, near)
            near = settings.bind or address
        require_token_beyond_loopback(near, settings.token, "the agent")
        if near.lower().startswith("fe80:"):
            raise ValueError(
                f"ranks that meet at {group} would listen on {near}, a link-local address, which means "
                "nothing on another host; take a multicast address of a wider scope (ff15:…), or set RANKMESH_BIND"
            )
        super().__init__(settings, near)
        self._job = job_digest(settings.job)
        # Names sort by precedence as host: rank 0, then processes without a rank; the others never host.
        self._may_serve = rank in (0, UNASSIGNED)
        self._election_seconds = 0.0 if rank == 0 else ELECTION_SECONDS
        self._name = f"{0 if rank == 0 else 1 if self._may_serve else 2}{secrets.token_hex(16)}"
        self._asking_since: float | None = None
        self._preferred: dict[str, float] = {}
        """Time of the last datagram of each process with precedence over this one, by name."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._host: threading.Thread | None = None
        self._channel = MulticastSocket(group, port, near, settings.token, interface)

    def find(self) -> str | None:
        with self._lock:
            if self._hosted is not None:
                return self._hosted.address.url
        url = self._ask()
        if url is None and self._is_elected():
            return self._serve()
        return url

    def close(self) -> None:
        self._ending.set()
        if self._host is not None:
            self._host.join()
        super().close()
        self._channel.close()

    def _ask(self) -> str | None:
        """Send one query; return the URL of the gateway that answered, None if none did."""
        if self._asking_since is None:
            self._asking_since = time.monotonic()
        self._channel.send(Datagram("ask", self._job, self._name))
        for message in self._channel.receive(ASK_SECONDS):
            if message.job != self._job or message.sender == self._name:
                continue
            if message.kind == "ask" and message.sender < self._name:
                self._preferred[message.sender] = time.monotonic()
            # Only an answer to this query: a replayed one may contain any address.
            if message.kind == "here" and message.to == self._name:
                if GatewayAddress(message.url, message.id).is_there():
                    self._asking_since = None
                    return message.url
                self._preferred[message.sender] = time.monotonic()  # it has only just started
        return None

    def _is_elected(self) -> bool:
        now = time.monotonic()
        if not self._may_serve or self._asking_since is None or now - self._asking_since < self._election_seconds:
            return False
        return all(now - heard > ELECTION_SECONDS for heard in self._preferred.values())

    def _serve(self) -> str:
        hosted = HostedGateway(self.bind_host, 0, self._settings)
        self._hosted, self._asking_since = hosted, None
        self._host = threading.Thread(target=self._answer, args=(hosted,), name="rankmesh-multicast", daemon=True)
        self._host.start()
        return hosted.address.url

    def _answer(self, hosted: HostedGateway) -> None:
        """Answer queries until this gateway closes or steps down."""
        forming, announced = True, 0.0
        while not self._ending.is_set():
            try:
                if forming and time.monotonic() - announced > ANNOUNCE_SECONDS:
                    forming, announced = not hosted.has_world(self._settings.job), time.monotonic()
                    self._announce(hosted)
                for message in self._channel.receive(ASK_SECONDS):
                    if message.job != self._job or message.sender == self._name:
                        continue
                    if message.kind == "ask":
                        self._announce(hosted, to=message.sender)
                    elif message.sender < self._name and self._step_down(
                        hosted, GatewayAddress(message.url, message.id)
                    ):
                        return
            except DistNetworkError:  # the network may be down temporarily
                self._ending.wait(ASK_SECONDS)
            except Exception as error:
                log_failure("the multicast group is not answered", error)
                self._ending.wait(ASK_SECONDS)

    def _announce(self, hosted: HostedGateway, to: str = "") -> None:
        self._channel.send(Datagram("here", self._job, self._name, to, *hosted.address))

    def _step_down(self, hosted: HostedGateway, other: GatewayAddress) -> bool:
        """Close this gateway in favour of another one, unless a world is complete here; return whether it did."""
        if hosted.has_world(self._settings.job) or not other.is_there():
            return False
        with self._lock:
            self._hosted = None
        hosted.close()
        return True
