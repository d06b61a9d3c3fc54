"""A gateway in this process, and how its address is passed on."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from rankmesh_agent.config.settings import Settings, is_loopback

_log = logging.getLogger("rankmesh")


class Address(NamedTuple):
    """Where a certain gateway is.

    A URL alone is not enough where it may be read after that gateway's end: by then its port may be anybody's, even the
    gateway's of another job.

    Attributes:
        url: its base URL.
        id: the random id with which it answers ``/health``.
    """

    url: str
    id: str

    def answers(self) -> bool:
        """Whether this very gateway is there."""
        from rankmesh_agent.membership.gateway_client import gateway_id

        return gateway_id(self.url) == self.id

    def encoded(self) -> str:
        """The address as JSON text."""
        return json.dumps(self._asdict())

    @classmethod
    def decoded(cls, text: str | bytes) -> Address | None:
        """Read what ``encoded`` wrote, None if it is something else."""
        try:
            return cls.of(json.loads(text))
        except ValueError:
            return None

    @classmethod
    def of(cls, said: object) -> Address | None:
        """Take an address out of decoded JSON, None if it is something else."""
        match said:
            case {"url": str(url), "id": str(id)}:
                return cls(url, id)
        return None


class HostedGateway:
    """A gateway in this process.

    Args:
        host: address to listen on.
        port: port, 0 for any free one.
        settings: what the environment says.
        names: host names under which it may be asked, besides those the settings have.

    Attributes:
        address: where others find it.

    Raises:
        ValueError: it would listen beyond loopback without a token.
        DistNetworkError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, settings: Settings, names: tuple[str, ...] = ()) -> None:
        from rankmesh_agent.http.server import HttpServer
        from rankmesh_gateway.state.registry import Registry

        self._http = HttpServer.bind(
            settings,
            host,
            port,
            role="the gateway",
            purpose="this process hosts the gateway",
            name="rankmesh-gateway",
        )
        self._registry = Registry()
        self.address = Address(self._http.url(_best(self._http.addresses)), self._registry.id)

        def make() -> Any:
            from rankmesh_gateway.http.app import create_app

            return create_app(self._registry, token=settings.token, names=[*names, *self._http.names])

        self._http.start(make)

    def busy(self, job: str) -> bool:
        """Whether a world of the job has come together here."""
        return any(info.state != "joining" for info in self._registry.ranks(job))

    def close(self, job: str) -> None:
        """Send everyone away, then end the service.

        Args:
            job: the job that hosted it.
        """
        others = {info.job for info in self._registry.ranks() if info.state not in ("left", "failed")} - {job}
        if others:
            _log.info(
                "the gateway at %s ends with job %r, which hosted it; ranks of %s are still there, and go on without "
                "it until one that may host it takes it over",
                self.address.url,
                job,
                ", ".join(map(repr, sorted(others))),
            )
        self._registry.close()
        self._http.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of the listening socket."""
        self._http.close_in_child()


def _best(addresses: list[str]) -> str:
    """The first address that other hosts can reach, if there is one: a host's name may stand for a loopback address."""
    return next((address for address in addresses if not is_loopback(address)), addresses[0])
