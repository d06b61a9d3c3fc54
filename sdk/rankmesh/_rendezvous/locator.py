"""The base class of gateway locators, and the addresses of a launcher's ranks: the master's, and that of a listener."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from dataclasses import replace

from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh_agent.config.addresses import is_loopback, resolves_to_loopback
from rankmesh_agent.config.launchers import Launcher
from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.net.sockets import address_towards, interface_for
from rankmesh_agent.wire.errors import DistNetworkError

LOOPBACK = "127.0.0.1"

_log = logging.getLogger("rankmesh")


class GatewayLocator(ABC):
    """Finds the gateway of a job, and hosts it if this process is the one to do so."""

    def __init__(self, settings: Settings, bind_host: str) -> None:
        self._settings = settings
        self._hosted: HostedGateway | None = None
        self.job = settings.job
        self.bind_host = bind_host

    @abstractmethod
    def find(self) -> str | None:
        """Return the gateway's URL, None while it is unknown; may host the gateway.

        Called until it returns a URL, and again if the gateway there does not answer. Takes a few seconds at most, so
        that the caller can keep a deadline, and can be interrupted by Ctrl-C.
        """

    def close(self) -> None:
        """Stop the gateway hosted here, if any."""
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.close()


class KnownGateway(GatewayLocator):
    """A running gateway at a known URL."""

    def __init__(self, url: str, host: str, port: int, settings: Settings) -> None:
        super().__init__(settings, listen_address(settings, host, port))
        self._url = url

    def find(self) -> str:
        return self._url


def listen_address(settings: Settings, host: str, port: int) -> str:
    """Return the address for this rank's agent: the configured one, else the local address on the route to ``host``."""
    if settings.bind is not None:
        return settings.bind
    if resolves_to_loopback(host):
        return host if is_loopback(host) and host.lower() != "localhost" else LOOPBACK
    if settings.interface is None:
        return address_towards(host, port)
    near = ""
    with contextlib.suppress(DistNetworkError):  # the name of the host may have no address yet
        near = address_towards(host, port)
    return interface_for(settings.interface, near).address


def configured_address(settings: Settings) -> str:
    """Return the address to listen on where no other host is known: RANKMESH_BIND, else the configured interface's.

    Loopback without either, or if no interface matches, which may be meant for GPUs alone, or there is no token.
    """
    if settings.bind is not None or settings.interface is None or settings.interface.startswith("^"):
        return settings.bind or LOOPBACK
    try:
        address = interface_for(settings.interface).address
        require_token_beyond_loopback(address, settings.token, "the agent")
    except (DistNetworkError, ValueError) as error:
        _log.warning("this rank listens on %s, so that only ranks on this host reach it: %s", LOOPBACK, error)
        return LOOPBACK
    return address


def with_master_address(settings: Settings, launcher: Launcher) -> Settings:
    """Return the settings with the address of rank 0's gateway, and the one that this host listens on, unless set."""
    host = settings.master_addr or launcher.host()
    port = launcher.port() if settings.master_port is None else settings.master_port
    if not host:
        raise ValueError(
            f"{launcher.kind.name} started ranks on several hosts, and does not say where rank 0 is: "
            f"{launcher.kind.address}"
        )
    if not (resolves_to_loopback(host) if launcher.one_host else is_loopback(host)):
        settings = _beyond_loopback(settings, launcher, host, port)
    return replace(settings, master_addr=host, master_port=port)


def _beyond_loopback(settings: Settings, launcher: Launcher, host: str, port: int) -> Settings:
    if not settings.token:
        raise ValueError(
            f"{launcher.kind.name} started ranks that meet at {host}, which other machines can reach, so they need a "
            f"token, the same for all: {launcher.kind.token}"
        )
    if settings.bind is not None:
        return settings
    own = "" if settings.interface is not None else launcher.own_address()
    own = own or listen_address(settings, host, port)
    if is_loopback(own) and not launcher.one_host:
        raise ValueError(
            f"{host}, where rank 0 is, stands for {own} on this host (see /etc/hosts), which other hosts cannot reach: "
            "set MASTER_ADDR to an address of rank 0's host that all can reach"
        )
    return replace(settings, bind=own)
