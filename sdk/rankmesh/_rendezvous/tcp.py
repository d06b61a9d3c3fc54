"""``tcp://host:port`` and ``env://``: the gateway's address is known to all ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh._rendezvous.locator import GatewayLocator, listen_address
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.sockets import url_for
from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError
from rankmesh_agent.wire.schemas import UNASSIGNED, GatewayHealth

_ANSWER_SECONDS = (2.0, 4.0, 8.0)
"""Time limits of the answers of a server that has the address."""


class TcpLocator(GatewayLocator):
    """Rank 0 starts the gateway, or without ranks the first process of that host to bind the address.

    Several jobs with different names may share an address, and the gateway that the first one starts. Should that fail,
    an eligible process of another job starts the next one, and the ranks' heartbeats restore its registry. The next one
    of a gateway that is a service is its operator's to start: it has the stores.

    Args:
        host: the gateway's host; without a rank, an address of one particular host.
    """

    def __init__(self, host: str, port: int, rank: int, settings: Settings) -> None:
        super().__init__(settings, listen_address(settings, host, port))
        self._host, self._port = host, port
        self._url = url_for(host, port)
        if rank == 0:
            self._may_serve = True
            self._serve_or_find()
        else:
            self._may_serve = rank == UNASSIGNED and _is_local_address(host)
            if self._may_serve:
                with contextlib.suppress(AddressInUseError):  # the join reports by which program
                    self._serve_unless_reachable()

    def find(self) -> str:
        if self._hosted is not None:
            self._hosted.raise_failure()
        if self._may_serve:
            with contextlib.suppress(DistNetworkError):
                self._serve_unless_reachable()
        return self._url

    def _serve_or_find(self) -> None:
        """Start the gateway, unless another process has; one that begins or ends may take its time to answer."""
        failure: DistNetworkError | None = None
        for seconds in _ANSWER_SECONDS:
            try:
                return self._serve()
            except DistNetworkError as error:
                failure = error
            if self._look_for_gateway(seconds):
                return None
        assert failure is not None
        raise failure

    def _serve_unless_reachable(self) -> None:
        if self._hosted is None and not self._look_for_gateway(_ANSWER_SECONDS[0]):
            self._serve()

    def _serve(self) -> None:
        host = self._settings.bind or self._host
        self._hosted = HostedGateway(host, self._port, self._settings, names=(self._host,), fixed=True)
        if self._port == 0:
            self._url = self._hosted.address.url

    def _look_for_gateway(self, seconds: float) -> GatewayHealth | None:
        """Look for a gateway at the address, and leave the next one of a service to its operator."""
        from rankmesh_agent.membership.gateway_client import gateway_health

        health = gateway_health(self._url, seconds) if self._port else None
        if health is not None:
            self._may_serve = self._may_serve and health.hosted
        return health


def _is_local_address(host: str) -> bool:
    """Return whether an address belongs to this host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise DistNetworkError(f"cannot resolve {host!r}: {error}", address=host) from error
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise ValueError(
            f"tcp://{host} does not say on which host the gateway is; give that host's address, or every process its "
            "rank"
        )
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
