"""The public names of ``import rankmesh as dist``."""

from __future__ import annotations

from types import FunctionType as _FunctionType

from rankmesh._collectives.all_to_all import all_to_all, all_to_all_single
from rankmesh._collectives.barrier import barrier, monitored_barrier
from rankmesh._collectives.broadcast import broadcast, scatter
from rankmesh._collectives.coalescing import Batch, all_gather_coalesced, all_reduce_coalesced, batch
from rankmesh._collectives.coalescing import _coalescing_manager as _coalescing_manager
from rankmesh._collectives.gather import all_gather, all_gather_into_tensor, all_gather_single, all_gather_v, gather
from rankmesh._collectives.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from rankmesh._collectives.objects import (
    all_gather_object,
    all_to_all_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from rankmesh._collectives.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from rankmesh._collectives.reduce import (
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    reduce_scatter_v,
)
from rankmesh._collectives.reduce_op import _make_nccl_premul_sum as _make_nccl_premul_sum
from rankmesh._collectives.reduce_op import reduce_op, supports_complex
from rankmesh._collectives.shared_memory import empty
from rankmesh._rendezvous.handlers import register_rendezvous_handler, rendezvous
from rankmesh._session.backend import (
    Backend,
    get_default_backend_for_device,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
)
from rankmesh._session.debug import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from rankmesh._session.groups import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from rankmesh._session.init import (
    GroupMember,
    default_pg_timeout,
    destroy_process_group,
    get_default_store,
    group,
    init_process_group,
    is_initialized,
)
from rankmesh._session.init import _get_default_store as _get_default_store
from rankmesh._session.process_group import ProcessGroup
from rankmesh._session.ranks import (
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
)
from rankmesh._stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from rankmesh_agent.group.work import Future, Work
from rankmesh_agent.wire.errors import (
    AddressInUseError,
    AgentTakenError,
    AuthenticationError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GatewayUnreachableError,
    GroupAbortedError,
    IdempotencyKeyReusedError,
    InvalidKeyError,
    InvalidValueError,
    JoinTimeoutError,
    KeyNotFoundError,
    LeaseEndedError,
    NoAgentsError,
    NoFreeAgentError,
    NotANumberError,
    NotLeasedError,
    PreconditionFailedError,
    ProtocolError,
    QueueEmptyError,
    RankFailedError,
    RankTakenError,
    StoreTimeoutError,
    UnsupportedStoreError,
    WorldSizeMismatchError,
)
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_agent.wire.version import __version__

__all__ = [
    # Start and end
    "init_process_group",
    "destroy_process_group",
    "is_initialized",
    "rendezvous",
    "register_rendezvous_handler",
    "default_pg_timeout",
    # Backends
    "Backend",
    "get_default_backend_for_device",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    # Groups
    "ProcessGroup",
    "GroupMember",
    "group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "shrink_group",
    "SHRINK_DEFAULT",
    "SHRINK_ABORT",
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_backend_config",
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
    "get_pg_count",
    "get_node_local_rank",
    # Collectives
    "ReduceOp",
    "reduce_op",
    "supports_complex",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_v",
    "all_gather_single",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_v",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    # Arrays in shared memory
    "empty",
    # Collectives over lists of arrays, one a device
    "broadcast_multigpu",
    "all_reduce_multigpu",
    "reduce_multigpu",
    "all_gather_multigpu",
    "reduce_scatter_multigpu",
    # Batches of collectives
    "Batch",
    "batch",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    # Point-to-point
    "send",
    "recv",
    "isend",
    "irecv",
    "P2POp",
    "batch_isend_irecv",
    # Objects
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "all_to_all_object",
    "send_object_list",
    "recv_object_list",
    # Debugging
    "DebugLevel",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
    # Asynchronous operations
    "Work",
    "Future",
    # Stores
    "Store",
    "TCPStore",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "get_default_store",
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
    "AgentTakenError",
    "NotLeasedError",
    "LeaseEndedError",
    "NoAgentsError",
    "NoFreeAgentError",
    "WorldSizeMismatchError",
    "DistStoreError",
    "InvalidKeyError",
    "InvalidValueError",
    "KeyNotFoundError",
    "NotANumberError",
    "PreconditionFailedError",
    "IdempotencyKeyReusedError",
    "QueueEmptyError",
    "UnsupportedStoreError",
    "StoreTimeoutError",
    "__version__",
]

for _name in __all__:  # tracebacks and help() show ``rankmesh.RankFailedError``, not the module of the definition
    _value = globals()[_name]
    if isinstance(_value, type | _FunctionType):
        _value.__module__ = "rankmesh"
