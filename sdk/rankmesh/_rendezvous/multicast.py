"""``tcp://239.…:port`` and ``tcp://[ff15:…]:port``: processes ask in a multicast group where the gateway is.

Who needs the gateway asks, again and again, until a host answers. Rank 0 hosts it at once when nobody answers. Of the
processes without a rank it is the one with the lowest random name among those that ask, once they have had time to hear
of each other. Should two host nevertheless, because datagrams were lost, they hear each other's announcements, and the
one with the higher name gives up; its joiners are sent away and find the other.
"""

from __future__ import annotations

import secrets
import threading
import time

from rankmesh._rendezvous.datagrams import Channel, Message, digest_of
from rankmesh._rendezvous.hosted import Address, HostedGateway
from rankmesh._rendezvous.locator import Meeting, chosen_host
from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.net.sockets import address_towards
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import UNASSIGNED

ASK_SECONDS = 0.1
"""How long an answer is waited for before asking again."""
SETTLE_SECONDS = 1.0
"""How long processes without a rank listen for each other before one of them hosts."""
ANNOUNCE_SECONDS = 0.5
"""How often a host says where it is until its world is complete."""


class AtMulticast(Meeting):
    """Rank 0, or one of the processes without a rank, hosts the gateway and tells in a multicast group where it is.

    Args:
        group: the multicast address.
        port: its port.
        rank: this process's rank, UNASSIGNED to be given one.
        settings: what the environment says.

    Raises:
        ValueError: it would listen beyond loopback without a token, or at an address that only means something here.
        DistNetworkError: there is no multicast on the interface.
    """

    def __init__(self, group: str, port: int, rank: int, settings: Settings) -> None:
        near = chosen_host(settings) or address_towards(group, port)
        require_token_beyond_loopback(near, settings.token, "the agent")
        if near.lower().startswith("fe80:"):
            raise ValueError(
                f"ranks that meet at {group} would listen on {near}, a link-local address, which another host cannot "
                "be told; take a multicast address of a wider scope (ff15:…), or set RANKMESH_BIND"
            )
        super().__init__(settings, near)
        self._job = digest_of(settings.job)
        # Names sort by who is to host: rank 0, then those without a rank; the others never do.
        self._may_serve = rank in (0, UNASSIGNED)
        self._settle = 0.0 if rank == 0 else SETTLE_SECONDS
        self._name = f"{0 if rank == 0 else 1 if self._may_serve else 2}{secrets.token_hex(16)}"
        self._asking_since: float | None = None
        self._first: dict[str, float] = {}
        """When others that come before this process were last heard of, hosts included, by name."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._host: threading.Thread | None = None
        self._channel = Channel(group, port, near, settings.token, settings.interface)

    def find(self) -> str | None:
        with self._lock:
            if self._hosted is not None:
                return self._hosted.address.url
        url = self._ask()
        if url is None and self._is_mine_to_host():
            return self._serve()
        return url

    def close(self) -> None:
        self._ending.set()
        if self._host is not None:
            self._host.join()
        super().close()
        self._channel.close()

    def close_in_child(self) -> None:
        super().close_in_child()
        self._channel.close()

    def _ask(self) -> str | None:
        """Ask once; return the URL of the gateway that answered, None if there is none yet."""
        if self._asking_since is None:
            self._asking_since = time.monotonic()
        self._channel.say(Message("ask", self._job, self._name))
        for message in self._channel.hear(ASK_SECONDS):
            if message.job != self._job or message.sender == self._name:
                continue
            if message.kind == "ask" and message.sender < self._name:
                self._first[message.sender] = time.monotonic()
            # Only an answer to this very question: an old one that somebody plays back may name anybody's address.
            if message.kind == "here" and message.to == self._name:
                if Address(message.url, message.id).answers():
                    self._asking_since = None
                    return message.url
                self._first[message.sender] = time.monotonic()  # it has only just begun
        return None

    def _is_mine_to_host(self) -> bool:
        now = time.monotonic()
        if not self._may_serve or self._asking_since is None or now - self._asking_since < self._settle:
            return False
        return all(now - heard > SETTLE_SECONDS for heard in self._first.values())

    def _serve(self) -> str:
        hosted = HostedGateway(self.bind_host, 0, self._settings)
        self._hosted, self._asking_since = hosted, None
        self._host = threading.Thread(target=self._answer, args=(hosted,), name="rankmesh-multicast", daemon=True)
        self._host.start()
        return hosted.address.url

    def _answer(self, hosted: HostedGateway) -> None:
        """Answer questions until the end, or until this gateway gives way to another."""
        forming, announced = True, 0.0
        while not self._ending.is_set():
            try:
                if forming and time.monotonic() - announced > ANNOUNCE_SECONDS:
                    forming, announced = not hosted.busy(self._settings.job), time.monotonic()
                    self._say_here(hosted)
                for message in self._channel.hear(ASK_SECONDS):
                    if message.job != self._job or message.sender == self._name:
                        continue
                    if message.kind == "ask":
                        self._say_here(hosted, to=message.sender)
                    elif message.sender < self._name and self._gives_way(hosted, Address(message.url, message.id)):
                        return
            except DistNetworkError:  # the network may be down for a moment
                self._ending.wait(ASK_SECONDS)

    def _say_here(self, hosted: HostedGateway, to: str = "") -> None:
        self._channel.say(Message("here", self._job, self._name, to, *hosted.address))

    def _gives_way(self, hosted: HostedGateway, other: Address) -> bool:
        """End this gateway because the other one is there, unless a world has come together here."""
        if hosted.busy(self._settings.job) or not other.answers():
            return False
        with self._lock:
            self._hosted = None
        hosted.close(self._settings.job)
        return True
