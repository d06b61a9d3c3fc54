"""Selection of the backend for a group's arrays on GPUs, agreed on by the ranks at the first call with such an array.

NCCL is selected where every rank has a GPU of its own; it refuses ranks that share one. Their arrays go through host
memory, as do those of ranks without NCCL.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rankmesh_agent.device import runtime
from rankmesh_agent.gpu.communicator import GpuCommunicator
from rankmesh_agent.gpu.nccl import NcclBackend
from rankmesh_agent.gpu.store_exchange import StoreExchange
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import DistBackendError

_log = logging.getLogger("rankmesh")


class _Capabilities(NamedTuple):
    """Facts that one rank publishes.

    Attributes:
        gpu: the GPU of its arrays, equal for ranks that share it.
        no_nccl: why NCCL is unavailable, '' if it is available.
    """

    gpu: str
    no_nccl: str


class GpuBackendSelector:
    """One rank's part in the selection.

    Args:
        host: the group's communicator for arrays in host memory.
        exchange: through which the ranks exchange their capabilities.
        requested: ``nccl`` or ``auto``.
    """

    def __init__(self, host: Communicator, exchange: StoreExchange, requested: str) -> None:
        self._host = host
        self._exchange = exchange
        self._requested = requested
        # Two locks are held during waits for other ranks, as threads of two ranks may enter them in opposite orders.
        self._collectives_lock = threading.Lock()
        self._p2p_lock = threading.Lock()
        self._nccl_lock = threading.Lock()
        self._published = False
        self._peers: dict[int, Communicator] = {}
        self._nccl: GpuCommunicator | None = None
        self._collectives: GpuCommunicator | None = None
        self._selected = False

    def for_collectives(self, device: int) -> Communicator:
        """Return the communicator for collectives on arrays on a GPU; the host's if they go through host memory.

        Raises:
            DistBackendError: NCCL is requested, and unavailable at some rank; raised at all ranks.
            CollectiveTimeoutError: a rank made no call with an array on a GPU; names it.
        """
        if not self._selected:
            with self._collectives_lock:
                if not self._selected:
                    self._collectives = self._select(device)
                    self._selected = True
        return self._collectives or self._host

    def for_p2p(self, device: int, peer: int) -> Communicator:
        """Return the communicator for arrays on a GPU to or from a group rank: see for_collectives."""
        comm = self._peers.get(peer)
        if comm is None:
            with self._p2p_lock:
                mine, theirs = self._capabilities(device, [self._host.rank, peer])
                through_host = mine.no_nccl or theirs.no_nccl or mine.gpu == theirs.gpu
                comm = self._peers[peer] = self._host if through_host else self._over_nccl()
        return comm

    @property
    def backend_name(self) -> str:
        """The backend of the collectives once it is selected, before that the requested one."""
        if not self._selected:
            return self._requested
        return "host" if self._collectives is None else self._collectives.backend

    def finish(self, timeout: float) -> None:
        """Wait until the GPUs have completed all calls so far: see GpuCommunicator."""
        for comm in {self._nccl, self._collectives}:
            if comm is not None:
                comm.finish(timeout)

    def end(self, *, in_order: bool) -> None:
        """End the calls on GPUs: see GpuCommunicator. Does nothing the second time."""
        for comm in {self._nccl, self._collectives}:
            if comm is not None:
                comm.end(in_order=in_order)
        self._exchange.delete_keys()

    def _capabilities(self, device: int, ranks: Sequence[int]) -> list[_Capabilities]:
        """Return the capabilities of some group ranks, this rank among them."""
        if not self._published:
            reason = runtime.unavailable_reason()
            if reason:  # of a torch tensor on a GPU, which needs no CuPy
                raise DistBackendError(f"an array on a GPU cannot be communicated: {reason}")
            mine = _Capabilities(runtime.gpu_id(device), runtime.nccl_unavailable_reason())
            self._exchange.publish("gpu", json.dumps(mine).encode())
            self._published = True
        deadline = Deadline(self._host.timeout)
        purpose = f"group {self._host.name!r} exchanges the GPUs of its ranks"
        return [_Capabilities(*json.loads(value)) for value in self._exchange.gather("gpu", ranks, deadline, purpose)]

    def _select(self, device: int) -> GpuCommunicator | None:
        host = self._host
        if host.size == 1 and runtime.nccl_unavailable_reason():
            return None
        capabilities = self._capabilities(device, range(host.size))
        ranks_of_gpu = defaultdict(list)
        for rank, each in zip(host.global_ranks, capabilities, strict=True):
            ranks_of_gpu[each.gpu].append(rank)
        without_nccl = next((rank for rank, each in enumerate(capabilities) if each.no_nccl), None)
        sharing = next((ranks for ranks in ranks_of_gpu.values() if len(ranks) > 1), None)
        if without_nccl is None and sharing is None:
            nccl = self._over_nccl()
            host.use_backend(nccl.gpu_backend)
            return nccl
        why = (
            f"ranks {', '.join(map(str, sharing))} share a GPU, which NCCL refuses"
            if sharing is not None
            else f"rank {host.global_ranks[without_nccl or 0]} has no NCCL: {capabilities[without_nccl or 0].no_nccl}"
        )
        if sharing is None and self._requested == "nccl":
            raise DistBackendError(f"backend 'nccl' cannot be used: {why}")
        if host.rank == 0:
            _log.warning("arrays on GPUs go through host memory in group %r: %s", host.name, why)
        return None

    def _over_nccl(self) -> GpuCommunicator:
        with self._nccl_lock:
            if self._nccl is None:
                host = self._host
                backend = NcclBackend(self._exchange, host.rank, host.size, host.name)
                self._nccl = GpuCommunicator(host, backend, self._exchange)
            return self._nccl
