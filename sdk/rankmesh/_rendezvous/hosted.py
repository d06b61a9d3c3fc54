"""A gateway hosted in this process, and its address as it is published."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from rankmesh_agent.config.addresses import is_loopback
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistNetworkError

_log = logging.getLogger("rankmesh")


class GatewayAddress(NamedTuple):
    """The address of one gateway.

    A URL alone is ambiguous if it is read after the gateway has ended: the port may belong to another process by then,
    even to another job's gateway.

    Attributes:
        url: base URL.
        id: the random id in the gateway's ``/health``.
    """

    url: str
    id: str

    def is_reachable(self) -> bool:
        """Return whether this gateway, and no other, answers at the URL."""
        from rankmesh_agent.membership.gateway_client import gateway_id

        return gateway_id(self.url) == self.id

    def to_json(self) -> str:
        """Return the address as JSON text."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str | bytes) -> GatewayAddress | None:
        """Parse the output of ``to_json``; None if the text is something else."""
        try:
            return cls.from_document(json_text.loads(text))
        except ValueError:
            return None

    @classmethod
    def from_document(cls, document: object) -> GatewayAddress | None:
        """Return the address in decoded JSON, None if it is something else."""
        match document:
            case {"url": str(url), "id": str(id)}:
                return cls(url, id)
        return None


class HostedGateway:
    """A gateway hosted in this process.

    Args:
        host: address to listen on.
        port: port, 0 for any free one.
        settings: the process's settings.
        names: accepted host names, besides those of the settings.

    Attributes:
        address: the address for other processes.

    Raises:
        ValueError: the address is beyond loopback and there is no token.
        DistNetworkError: the address cannot be bound.
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
        self.address = GatewayAddress(self._http.url(_most_reachable(self._http.addresses)), self._registry.id)

        def make() -> Any:
            from rankmesh_gateway.http.app import create_app

            return create_app(self._registry, token=settings.credentials, names=[*names, *self._http.names])

        self._http.start(make)

    def raise_failure(self) -> None:
        """Raise if no process can reach the gateway.

        Raises:
            DistNetworkError: it cannot serve.
        """
        why = self._http.failure
        if why:
            raise DistNetworkError(
                f"the gateway, which this process hosts at {self.address.url}, cannot serve: {why}",
                address=self.address.url,
            )

    def has_world(self, job: str) -> bool:
        """Return whether a world of the job is complete at this gateway."""
        return any(info.state != "joining" for info in self._registry.ranks(job))

    def close(self, job: str) -> None:
        """Close all waiting requests and event streams, then stop serving.

        Args:
            job: the job that hosts the gateway.
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
        """In a forked child: close the listening socket."""
        self._http.close_in_child()


def _most_reachable(addresses: list[str]) -> str:
    """Return the first address beyond loopback, else the first: a host name may resolve to a loopback address."""
    return next((address for address in addresses if not is_loopback(address)), addresses[0])
