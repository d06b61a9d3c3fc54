"""What all ways to find a gateway have in common, and where ranks listen."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh_agent.config.settings import Settings, is_loopback
from rankmesh_agent.net.sockets import address_of_interface, address_towards

LOOPBACK = "127.0.0.1"


class Meeting(ABC):
    """Where the ranks of a job find their gateway, and how this process hosts it if that is up to it.

    Args:
        settings: what the environment says.
        bind_host: the address this rank's agent listens on.

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
        """Return the gateway's URL, None while it is not known; host the gateway if that is up to this process now.

        It is called until there is an URL, and again whenever nobody answers there. It takes no longer than a few
        seconds, so that its caller keeps to a deadline, and Ctrl-C ends it.

        Raises:
            ValueError: this process has to host the gateway but must not; says what to set.
            DistNetworkError: this process has to host the gateway but cannot.
        """

    def close(self) -> None:
        """End what is hosted here."""
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.close(self._settings.job)

    def close_in_child(self) -> None:
        """In a forked child: let go of what the parent hosts."""
        if self._hosted is not None:
            self._hosted.close_in_child()


class Known(Meeting):
    """A gateway that runs already, at a URL that is known.

    Args:
        url: its base URL.
        host: the URL's host.
        port: the URL's port.
        settings: what the environment says.
    """

    def __init__(self, url: str, host: str, port: int, settings: Settings) -> None:
        super().__init__(settings, listen_on(settings, host, port))
        self._url = url

    def find(self) -> str:
        return self._url


def listen_on(settings: Settings, host: str, port: int) -> str:
    """Choose the address for this rank's agent: the one that faces ``host``, unless something else is set.

    Raises:
        DistNetworkError: there is no way to ``host``, or no such interface as is set.
    """
    chosen = chosen_host(settings)
    if chosen is not None:
        return chosen
    if is_loopback(host):
        return LOOPBACK if host == "localhost" else host
    return address_towards(host, port)


def chosen_host(settings: Settings) -> str | None:
    """Return the address to listen on that RANKMESH_BIND or an interface's name says, None if nothing is set."""
    if settings.bind is not None:
        return settings.bind
    return address_of_interface(settings.interface) if settings.interface is not None else None
