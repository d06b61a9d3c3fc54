"""Which engine carries out a group's calls on arrays on GPUs: the ranks find that out together, when the first comes.

NCCL, where every rank has a GPU of its own. It refuses ranks that share one; these read each other's memory by CUDA
IPC, if they are on one host. Where neither is to be had, the arrays go through host memory.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from rankmesh_agent.device import runtime
from rankmesh_agent.gpu.communicator import GpuCommunicator
from rankmesh_agent.gpu.cuda_ipc import CudaIpcBackend
from rankmesh_agent.gpu.nccl import NcclBackend
from rankmesh_agent.gpu.store_exchange import StoreExchange
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import DistBackendError

_log = logging.getLogger("rankmesh")


class _Fact(NamedTuple):
    """What one rank says.

    Attributes:
        gpu: which GPU its arrays are on, equal for ranks that share it.
        no_nccl: why it cannot use NCCL; nothing if it can.
        shares: whether it shares memory with all members.
    """

    gpu: str
    no_nccl: str
    shares: bool


class GpuBackendSelector:
    """One rank's part in it.

    Args:
        host: the group's calls on arrays in host memory.
        exchange: what the ranks tell each other through.
        hosts: what is equal for members on one host, by group rank.
        wanted: ``nccl``, which has to be there; ``mpi``, which has to take arrays on GPUs; or ``auto``.
    """

    def __init__(self, host: Communicator, exchange: StoreExchange, hosts: Sequence[Hashable], wanted: str) -> None:
        self._host = host
        self._exchange = exchange
        self._hosts = hosts
        self._wanted = wanted
        self._choosing = threading.Lock()  # held while others are waited for; two, as threads may wait crosswise
        self._asking = threading.Lock()
        self._making = threading.Lock()
        self._told = False
        self._peers: dict[int, Communicator] = {}
        self._nccl: GpuCommunicator | None = None
        self._collectives: GpuCommunicator | None = None
        self._chosen = False

    def for_collectives(self, device: int) -> Communicator:
        """Return who makes collectives of arrays on a GPU; the host's calls if they are to go through host memory.

        Raises:
            DistBackendError: NCCL is wanted, and a rank does not have it; the same at all ranks.
            CollectiveTimeoutError: a rank did not come with an array on a GPU; names it.
        """
        if not self._chosen:
            with self._choosing:
                if not self._chosen:
                    self._collectives = self._choose(device)
                    self._chosen = True
        return self._collectives or self._host

    def for_multigpu(self, device: int) -> GpuCommunicator | None:
        """Return who makes collectives in which each rank has arrays on several GPUs; None for host memory."""
        calls = self.for_collectives(device)
        return calls if isinstance(calls, GpuCommunicator) and calls is self._nccl else None

    def for_p2p(self, device: int, peer: int) -> Communicator:
        """Return who carries an array on a GPU to or from a group rank: see for_collectives."""
        if self._wanted == "mpi":
            return self._host
        found = self._peers.get(peer)
        if found is None:
            with self._asking:
                mine, theirs = self._facts(device, [self._host.rank, peer])
                through_host = mine.no_nccl or theirs.no_nccl or mine.gpu == theirs.gpu
                found = self._peers[peer] = self._host if through_host else self._over_nccl()
        return found

    @property
    def backend_name(self) -> str:
        """What carries out the collectives, as far as that has been found: what is wanted before."""
        if not self._chosen:
            return self._wanted
        return "host" if self._collectives is None else self._collectives.backend

    def finish(self, timeout: float) -> None:
        """Wait until the GPUs have carried out all calls so far: see GpuCommunicator."""
        for calls in {self._nccl, self._collectives}:
            if calls is not None:
                calls.finish(timeout)

    def end(self, *, in_order: bool) -> None:
        """End the calls on GPUs; what was called before is carried out first, or not. Does nothing the second time."""
        for calls in {self._nccl, self._collectives}:
            if calls is not None:
                calls.end(in_order=in_order)
        self._exchange.delete_keys()

    def _facts(self, device: int, ranks: Sequence[int]) -> list[_Fact]:
        """Return what ranks say, this one among them."""
        if not self._told:
            shares = self._host.queue.backend.segment is not None
            fact = _Fact(runtime.gpu_id(device), runtime.nccl_unavailable_reason(), shares)
            self._exchange.publish("gpu", json.dumps(fact).encode())
            self._told = True
        deadline = Deadline(self._host.timeout)
        why = f"group {self._host.name!r} looks which GPUs its ranks have"
        return [_Fact(*json.loads(said)) for said in self._exchange.gather("gpu", ranks, deadline, why)]

    def _choose(self, device: int) -> GpuCommunicator | None:
        host = self._host
        if self._wanted == "mpi":
            return self._over_mpi()
        if host.size == 1 and runtime.nccl_unavailable_reason():
            return None
        facts = self._facts(device, range(host.size))
        sharing = defaultdict(list)
        for number, fact in zip(host.global_ranks, facts, strict=True):
            sharing[fact.gpu].append(number)
        without = next((rank for rank, fact in enumerate(facts) if fact.no_nccl), None)
        together = next((numbers for numbers in sharing.values() if len(numbers) > 1), None)
        if without is None and together is None:
            made = self._over_nccl()
            host.use_backend(made.gpu_backend)
            return made
        why = (
            f"ranks {', '.join(map(str, together))} share a GPU, which NCCL refuses"
            if together is not None
            else f"rank {host.global_ranks[without or 0]} has no NCCL: {facts[without or 0].no_nccl}"
        )
        if together is None and self._wanted == "nccl":
            raise DistBackendError(f"backend 'nccl' cannot be used: {why}")
        if len(set(self._hosts)) > 1:
            refused = "they are not all on one host, as CUDA IPC needs"
        elif not all(fact.shares for fact in facts):
            refused = "they have no shared memory to meet in, as CUDA IPC needs"
        else:
            engine = CudaIpcBackend(host, self._exchange)
            refused = engine.handshake(device, Deadline(host.timeout))
            if not refused:
                host.use_backend(engine)
                return GpuCommunicator(host, engine, self._exchange)
        if host.rank == 0:
            _log.warning("arrays on GPUs go through host memory in group %r: %s; %s", host.name, why, refused)
        return None

    def _over_mpi(self) -> GpuCommunicator:
        from rankmesh_agent.gpu.mpi import CudaAwareMpiBackend
        from rankmesh_agent.mpi.backend import MpiBackend
        from rankmesh_agent.mpi.library import cuda_aware

        backend = self._host.queue.backend
        assert isinstance(backend, MpiBackend)  # whoever chose MPI for GPUs did so for host memory
        if not cuda_aware():
            raise DistBackendError(
                "this MPI does not take arrays on GPUs: install one that is built with CUDA, or name another backend "
                "for them: 'cpu:mpi,cuda:nccl', or 'cpu:mpi,cuda:gloo' through host memory"
            )
        engine = CudaAwareMpiBackend(backend)
        self._host.use_backend(engine)
        return GpuCommunicator(self._host, engine, self._exchange)

    def _over_nccl(self) -> GpuCommunicator:
        with self._making:
            if self._nccl is None:
                host = self._host
                engine = NcclBackend(self._exchange, host.rank, host.size, host.name)
                self._nccl = GpuCommunicator(host, engine, self._exchange)
            return self._nccl
