"""Choice of the transport to each peer: shared memory on the same host, TCP to others."""

from __future__ import annotations

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.transports.shm_ring import RingTransport
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import Member

_RING_BUDGET = 8 << 20
_MAX_RING, _MIN_RING = 1 << 19, 1 << 16


def transport_between(settings: Settings, member: Member, peer: Member, world_size: int) -> TcpTransport:
    """Return the transport from a member to a peer; to itself, the one that listens for all peers.

    Raises:
        DistNetworkError: RANKMESH_TRANSPORT is shm, and the two ranks do not share memory.
    """
    strict, same_host = settings.transport == "shm", peer.host_id == member.host_id
    if strict and not same_host:
        raise DistNetworkError(
            f"RANKMESH_TRANSPORT=shm, but {peer.described()} is on another host than {member.described()}, or "
            "sees another RANKMESH_SHM_DIR; unset RANKMESH_TRANSPORT",
            ranks=[peer.rank],
        )
    if not same_host or settings.transport == "tcp":
        return TcpTransport(settings.job_token)
    ring_bytes = max(_MIN_RING, min(_MAX_RING, _RING_BUDGET // (2 * world_size)))
    return RingTransport(settings.job_token, settings.shm_dir, settings.job, ring_bytes=ring_bytes, strict=strict)
