"""Selection of the backend for a group's arrays on GPUs, agreed on by the ranks at the first call with such an array.

NCCL is selected where every rank has a GPU of its own. It refuses ranks that share one, unless the user allows it by
NCCL's variable: their arrays go through host memory, as do those of ranks without NCCL.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from typing import NamedTuple

from rankmesh_agent.device import runtime
from rankmesh_agent.gpu import exchange
from rankmesh_agent.gpu.communicator import GpuCommunicator
from rankmesh_agent.gpu.nccl import NcclBackend
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import DistBackendError

_log = logging.getLogger("rankmesh")
_BYTES = 1024
"""Size of a rank's description, whose reason is cut to fit."""
SHARING_VERSION = 23_000
"""First version of NCCL that takes ranks which share a GPU."""


class _Capabilities(NamedTuple):
    """Capabilities of a rank, which it sends to the other ranks.

    Attributes:
        gpu: the GPU of its arrays, equal for ranks that share it.
        no_nccl: why NCCL is unavailable, '' if it is available.
        shares: whether its NCCL allows ranks that share a GPU.
    """

    gpu: str
    no_nccl: str
    shares: bool


class GpuBackendSelector:
    """One rank's part in the selection.

    Args:
        requested: ``nccl`` or ``auto``.
        shares: whether the user allows ranks that share a GPU, by NCCL_MULTI_RANK_GPU_ENABLE=1.
    """

    def __init__(self, host: Communicator, requested: str, shares: bool) -> None:
        self._host = host
        self._requested = requested
        self._shares = shares
        # Two locks are held during waits for other ranks, as threads of two ranks may enter them in opposite orders.
        self._collectives_lock = threading.Lock()
        self._p2p_lock = threading.Lock()
        self._nccl_lock = threading.Lock()
        self._known: list[_Capabilities] = []
        self._peers: dict[int, Communicator] = {}
        self._nccl: GpuCommunicator | None = None
        self._collectives: Communicator | None = None
        self._warned = False

    def for_collectives(self, device: int) -> Communicator:
        """Return the communicator for collectives on arrays on a GPU; the host's if they go through host memory.

        Raises:
            DistBackendError: NCCL is requested, and unavailable at some rank; raised at all ranks.
            CollectiveTimeoutError: a rank made no call with an array on a GPU; names it.
        """
        if self._collectives is None:
            with self._collectives_lock:
                if self._collectives is None:
                    self._collectives = self._select(device)
        return self._collectives

    def for_p2p(self, device: int, peer: int) -> Communicator:
        """Return the communicator for arrays on a GPU to or from a group rank: see for_collectives."""
        comm = self._peers.get(peer)
        if comm is None:
            with self._p2p_lock:
                pair = {self._host.rank: self._capabilities(device), peer: self._capabilities_of(device, peer)}
                why = self._why_not_nccl(pair)
                if why:
                    self._warn(why)
                comm = self._peers[peer] = self._host if why else self._over_nccl()
        return comm

    @property
    def backend_name(self) -> str:
        """The backend of the collectives once it is selected, before that the requested one."""
        if self._collectives is None:
            return self._requested
        return "host" if self._collectives is self._host else self._collectives.backend

    def finish(self, timeout: float) -> None:
        """Wait until the GPUs have completed all calls so far: see GpuCommunicator."""
        if self._nccl is not None:
            self._nccl.finish(timeout)

    def end(self, *, in_order: bool) -> None:
        """End the calls on GPUs: see GpuCommunicator. Does nothing the second time."""
        if self._nccl is not None:
            self._nccl.end(in_order=in_order)

    def _select(self, device: int) -> Communicator:
        host = self._host
        if host.size == 1 and runtime.nccl_unavailable_reason():
            return host
        mine, deadline = _encoded(self._capabilities(device)), Deadline(host.timeout)
        found = exchange.share(host, mine, _BYTES, "the GPUs of the ranks", deadline) if host.size > 1 else [mine]
        self._known = [_Capabilities(*json.loads(value)) for value in found]
        why = self._why_not_nccl(dict(enumerate(self._known)))
        if not why:
            nccl = self._over_nccl()
            host.use_backend(nccl.gpu_backend)
            return nccl
        if self._requested == "nccl" and any(each.no_nccl for each in self._known):
            raise DistBackendError(f"backend 'nccl' cannot be used: {why}")
        self._warn(why)
        return host

    def _capabilities(self, device: int) -> _Capabilities:
        """Return this rank's capabilities; raise without CuPy, which a torch tensor on a GPU does not need."""
        reason = runtime.unavailable_reason()
        if reason:
            raise DistBackendError(f"an array on a GPU cannot be communicated: {reason}")
        no_nccl = runtime.nccl_unavailable_reason()
        shares = self._shares and not no_nccl and runtime.nccl().get_version() >= SHARING_VERSION
        return _Capabilities(runtime.gpu_id(device), no_nccl, shares)

    def _capabilities_of(self, device: int, peer: int) -> _Capabilities:
        """Return the capabilities of another rank; receive them in a message unless a collective has exchanged all."""
        if self._known:
            return self._known[peer]
        deadline = Deadline(self._host.timeout)
        value = exchange.swap(self._host, peer, _encoded(self._capabilities(device)), _BYTES, deadline)
        return _Capabilities(*json.loads(value))

    def _why_not_nccl(self, ranks: dict[int, _Capabilities]) -> str:
        """Return why NCCL cannot be used between some group ranks, '' if it can."""
        ranks_of_gpu = defaultdict(list)
        allowed = all(found.shares for found in ranks.values())
        for rank, found in ranks.items():
            if found.no_nccl:
                return f"rank {self._host.global_ranks[rank]} has no NCCL: {found.no_nccl}"
            ranks_of_gpu[found.gpu].append(self._host.global_ranks[rank])
        for sharing in ranks_of_gpu.values():
            if len(sharing) > 1 and not allowed:
                return (
                    f"ranks {', '.join(map(str, sharing))} share a GPU, which NCCL refuses (from 2.30 on it takes them "
                    "where NCCL_MULTI_RANK_GPU_ENABLE=1 at all ranks)"
                )
        return ""

    def _warn(self, why: str) -> None:
        """Log once, at one rank of the group, that arrays go through host memory."""
        if not self._warned and self._host.rank == 0:
            _log.warning("arrays on GPUs go through host memory in group %r: %s", self._host.name, why)
        self._warned = True

    def _over_nccl(self) -> GpuCommunicator:
        with self._nccl_lock:
            if self._nccl is None:
                self._nccl = GpuCommunicator(self._host, NcclBackend(self._host))
            return self._nccl


def _encoded(mine: _Capabilities) -> bytes:
    return json.dumps(mine._replace(no_nccl=mine.no_nccl[: _BYTES // 4])).encode()
