"""``tcp://239.…:port`` and ``tcp://[ff15:…]:port``: processes query a multicast group for the gateway's address.

A process repeats its query until a host answers. Rank 0 hosts the gateway as soon as no answer arrives. Of the
processes without a rank, the one with the lowest random name among the queries hosts, after an election period. If two
processes host nevertheless, because datagrams were lost, each receives the other's announcements, and the one with the
higher name steps down; its joiners are rejected and find the other gateway.
"""

from __future__ import annotations

import secrets
import threading
import time

from rankmesh._rendezvous.datagrams import Datagram, MulticastSocket, job_digest
from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh._rendezvous.locator import GatewayLocator
from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.net.sockets import address_towards, interface_for
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import UNASSIGNED

ASK_SECONDS = 0.1
"""Wait for an answer before the next query."""
ELECTION_SECONDS = 1.0
"""Processes without a rank listen for each other this long before one of them hosts."""
ANNOUNCE_SECONDS = 0.5
"""Interval of a host's announcements until its world is complete."""


class MulticastLocator(GatewayLocator):
    """Rank 0, or one of the processes without a rank, hosts the gateway and announces it in a multicast group.

    Args:
        group: multicast address.
        port: port of the group.
        rank: this process's rank, UNASSIGNED if the gateway assigns one.
        settings: the process's settings.

    Raises:
        ValueError: the address is beyond loopback and there is no token, or it is link-local.
        DistNetworkError: the interface does not support multicast.
    """

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
