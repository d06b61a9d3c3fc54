"""``env://`` under torchrun: rank 0 publishes the gateway's address in torchrun's store at MASTER_PORT."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rankmesh_agent.wire.errors import DistNetworkError

_TIMEOUT = timedelta(seconds=60)
"""For the connection: torchrun creates the store before it starts the ranks."""


def torchrun_store(host: str, port: int) -> Any:
    """Return torchrun's store.

    Raises:
        DistNetworkError: the store is unreachable.
    """
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
    except Exception as error:  # torch has error classes of its own
        raise DistNetworkError(
            f"cannot reach torchrun's store at MASTER_ADDR and MASTER_PORT, {host}:{port}: {error}. Another gateway's "
            "address belongs into RANKMESH_GATEWAY, or into init_method='tcp://host:port'",
            address=f"{host}:{port}",
        ) from error
