"""The base class of gateway locators, and the choice of the address that a rank listens on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh_agent.config.addresses import is_loopback, resolves_to_loopback
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.sockets import address_of_interface, address_towards

LOOPBACK = "127.0.0.1"


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
            hosted.close(self._settings.job)

    def close_in_child(self) -> None:
        """In a forked child: close the parent's listening socket."""
        if self._hosted is not None:
            self._hosted.close_in_child()


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
        DistNetworkError: there is no route to ``host``, or the configured interface does not exist.
    """
    chosen = configured_address(settings)
    if chosen is not None:
        return chosen
    if resolves_to_loopback(host):
        return host if is_loopback(host) and host.lower() != "localhost" else LOOPBACK
    return address_towards(host, port)


def configured_address(settings: Settings) -> str | None:
    """Return the address of RANKMESH_BIND or of the configured interface, None without either."""
    if settings.bind is not None:
        return settings.bind
    return address_of_interface(settings.interface) if settings.interface is not None else None
