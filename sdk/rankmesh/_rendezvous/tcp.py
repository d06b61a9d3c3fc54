"""``tcp://host:port`` and ``env://``: the gateway is at an address that everyone knows."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh._rendezvous.locator import Meeting, listen_on
from rankmesh._rendezvous.urls import url_for
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError
from rankmesh_agent.wire.schemas import UNASSIGNED


class AtAddress(Meeting):
    """Rank 0 hosts the gateway, or whichever process without a rank is first to listen at the address.

    Several jobs, told apart by their names, may use one address. The gateway ends with the job that hosts it; then a
    process of another job that may host it takes it over, and the ranks' heartbeats tell it who is there.

    Args:
        host: the address; without a rank one of those of a certain host.
        port: its port.
        rank: this process's rank, UNASSIGNED to be given one.
        settings: what the environment says.

    Raises:
        ValueError: it would listen beyond loopback without a token, or the address is every host's.
        AddressInUseError: somebody who is not a gateway listens there, and this is rank 0.
        DistNetworkError: this process has to listen there, but cannot.
    """

    def __init__(self, host: str, port: int, rank: int, settings: Settings) -> None:
        super().__init__(settings, listen_on(settings, host, port))
        self._host, self._port = host, port
        self._url = url_for(host, port)
        if rank == 0:
            self._may_serve = True
            self._serve_unless_there_is_one()
        else:
            self._may_serve = rank == UNASSIGNED and _is_ours(host)
            if self._may_serve:
                with contextlib.suppress(AddressInUseError):  # the join finds out by whom
                    self._serve_if_nobody_answers()

    def find(self) -> str:
        if self._may_serve:
            with contextlib.suppress(DistNetworkError):
                self._serve_if_nobody_answers()
        return self._url

    def _serve_unless_there_is_one(self) -> None:
        try:
            self._serve()
        except DistNetworkError:
            if not self._answers():
                self._serve()  # one that was about to end was still in the way

    def _serve_if_nobody_answers(self) -> None:
        if self._hosted is None and not self._answers():
            self._serve()

    def _serve(self) -> None:
        host = self._settings.bind or self._host
        self._hosted = HostedGateway(host, self._port, self._settings, names=(self._host,))
        if self._port == 0:
            self._url = self._hosted.address.url

    def _answers(self) -> bool:
        from rankmesh_agent.membership.gateway_client import gateway_id

        return self._port != 0 and gateway_id(self._url) is not None


def _is_ours(host: str) -> bool:
    """Whether an address is one of this host's.

    Raises:
        ValueError: it is every host's, so that it does not say which one is to host the gateway.
        DistNetworkError: it cannot be resolved.
    """
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
