"""The base class of gateway locators, and the choice of the address that a rank listens on."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod

from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh_agent.config.addresses import is_loopback, resolves_to_loopback
from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.net.sockets import address_towards, interface_for
from rankmesh_agent.wire.errors import DistNetworkError

LOOPBACK = "127.0.0.1"

_log = logging.getLogger("rankmesh")


class GatewayLocator(ABC):
    """Finds the gateway of a job, and hosts it if this process is the one to do so.

    Args:
        settings: the process's settings.
        bind_host: the address that this rank's agent listens on.

    Attributes:
        job: the job's name.
    """

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

        Raises:
            ValueError: this process should host the gateway, but a setting forbids it.
            DistNetworkError: this process should host the gateway, but cannot.
        """

    def close(self) -> None:
        """Stop the gateway hosted here, if any."""
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.close()


class KnownGateway(GatewayLocator):
    """A running gateway at a known URL.

    Args:
        url: base URL.
        host: host of the URL.
        port: port of the URL.
        settings: the process's settings.
    """

    def __init__(self, url: str, host: str, port: int, settings: Settings) -> None:
        super().__init__(settings, listen_address(settings, host, port))
        self._url = url

    def find(self) -> str:
        return self._url


def listen_address(settings: Settings, host: str, port: int) -> str:
    """Return the address for this rank's agent: the configured one, else the local address on the route to ``host``.

    Raises:
        DistNetworkError: there is no route to ``host``, or no interface that the configured pattern allows.
    """
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
