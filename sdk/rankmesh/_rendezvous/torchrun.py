"""``env://`` under torchrun: at MASTER_PORT is a store of torchrun's, in which rank 0 says where the gateway is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rankmesh_agent.wire.errors import DistNetworkError

_PATIENCE = timedelta(seconds=60)
"""How long the store may take to answer: torchrun has it before it starts the ranks."""


def store_at(host: str, port: int) -> Any:
    """Return torchrun's store.

    Raises:
        DistNetworkError: it cannot be reached.
    """
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, is_master=False, timeout=_PATIENCE)
    except Exception as error:  # torch's errors are of its own kind
        raise DistNetworkError(
            f"cannot reach torchrun's store at MASTER_ADDR and MASTER_PORT, {host}:{port}: {error}. Another gateway's "
            "address belongs into RANKMESH_GATEWAY, or into init_method='tcp://host:port'",
            address=f"{host}:{port}",
        ) from error
