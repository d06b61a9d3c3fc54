"""torch.distributed as a mesh of services: ``import rankmesh as dist``.

The functions have the names, arguments and meaning of torch.distributed and take NumPy arrays. A rank that dies or
strays is named in the errors of the others. See the README for the three ways to use it.
"""

from __future__ import annotations

from rankmesh._collectives import all_gather, all_reduce, barrier, broadcast
from rankmesh._p2p import irecv, isend, recv, send
from rankmesh._world import (
    GroupMember,
    ProcessGroup,
    default_pg_timeout,
    destroy_process_group,
    get_backend,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
    new_group,
)
from rankmesh_agent.engine.work import Future, Work
from rankmesh_agent.wire.errors import (
    AddressInUseError,
    AuthenticationError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GatewayUnreachableError,
    GroupAbortedError,
    InvalidKeyError,
    JoinTimeoutError,
    KeyNotFoundError,
    NotANumberError,
    ProtocolError,
    RankFailedError,
    RankTakenError,
    StoreTimeoutError,
    WorldSizeMismatchError,
)
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_agent.wire.version import __version__

__all__ = [
    # Start and end
    "init_process_group",
    "destroy_process_group",
    "is_available",
    "is_initialized",
    "default_pg_timeout",
    # Groups
    "ProcessGroup",
    "GroupMember",
    "new_group",
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_process_group_ranks",
    # Collectives
    "ReduceOp",
    "all_reduce",
    "broadcast",
    "all_gather",
    "barrier",
    # Point-to-point
    "send",
    "recv",
    "isend",
    "irecv",
    # Asynchronous operations
    "Work",
    "Future",
    # Errors; the tree is in rankmesh_agent.wire.errors
    "DistError",
    "DistBackendError",
    "CollectiveMismatchError",
    "RankFailedError",
    "CollectiveTimeoutError",
    "GroupAbortedError",
    "DistNetworkError",
    "AddressInUseError",
    "AuthenticationError",
    "ProtocolError",
    "GatewayUnreachableError",
    "JoinTimeoutError",
    "RankTakenError",
    "WorldSizeMismatchError",
    "DistStoreError",
    "InvalidKeyError",
    "KeyNotFoundError",
    "NotANumberError",
    "StoreTimeoutError",
    "__version__",
]
