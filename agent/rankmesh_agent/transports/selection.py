"""Choice of the transport to each peer: shared memory on the same host, TCP to others."""

from __future__ import annotations

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.transports.shm_ring import RingTransport
from rankmesh_agent.transports.tcp import TcpListener, TcpTransport
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import Member

_RING_BUDGET = 8 << 20
"""Total size of the rings of a rank, in bytes."""
_MAX_RING, _MIN_RING = 1 << 19, 1 << 16


class TransportSelector:
    """Transports of one rank.

    Args:
        settings: settings of the job.
        world_size: number of ranks in the job.
    """

    def __init__(self, settings: Settings, world_size: int) -> None:
        self._settings = settings
        self._world_size = world_size

    def listen(self, host: str) -> TcpListener:
        """Return a listener on a free port, for peers on this host and on others."""
        return self._transport(same_host=self._settings.transport != "tcp").listen(f"{host}:0")

    def transport(self, member: Member, peer: Member) -> TcpTransport:
        """Return the transport from a member to a peer.

        Raises:
            DistNetworkError: RANKMESH_TRANSPORT is shm, and the two ranks do not share memory.
        """
        same_host = peer.host_id == member.host_id
        if self._settings.transport == "shm" and not same_host:
            raise DistNetworkError(
                f"RANKMESH_TRANSPORT=shm, but {peer.described()} is on another host than {member.described()}, or "
                "sees another RANKMESH_SHM_DIR; unset RANKMESH_TRANSPORT",
                ranks=[peer.rank],
            )
        return self._transport(same_host=same_host and self._settings.transport != "tcp")

    def _transport(self, *, same_host: bool) -> TcpTransport:
        settings = self._settings
        if not same_host:
            return TcpTransport(settings.job_token)
        return RingTransport(
            settings.job_token,
            settings.shm_dir,
            settings.job,
            ring_bytes=max(_MIN_RING, min(_MAX_RING, _RING_BUDGET // (2 * self._world_size))),
            strict=settings.transport == "shm",
        )
