"""The libraries as seen from a rank: how it joins, and the calls a user would write on NumPy arrays.

RankMesh and torch.distributed are called by the same lines: they have the same names. Every method takes arrays and
returns the call to be timed. Imports are inside of the functions: a rank loads the library it measures and no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np

Array = np.ndarray
Call = Callable[[], object]
Start = Callable[[], Any]
"""Begins an operation and returns something to wait for."""

ROOT = 0
"""The rank that has the whole array in rooted operations."""


class World(Protocol):
    """A rank's view of the world it has joined.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        version: of the library that is measured.
    """

    rank: int
    size: int
    version: str

    def empty(self, count: int, dtype: np.dtype) -> Array:
        """Return an array for operations; every rank asks for the same ones in the same order."""

    def barrier(self) -> Call: ...
    def all_reduce(self, array: Array) -> Call: ...
    def start_all_reduce(self, array: Array) -> Start: ...
    def broadcast(self, array: Array) -> Call: ...
    def reduce(self, array: Array) -> Call: ...
    def all_gather(self, whole: Array, share: Array) -> Call: ...
    def reduce_scatter(self, share: Array, whole: Array) -> Call: ...
    def all_to_all(self, output: Array, input: Array) -> Call: ...
    def gather(self, whole: Array, share: Array) -> Call: ...
    def scatter(self, share: Array, whole: Array) -> Call: ...
    def send(self, array: Array, to: int) -> Call: ...
    def recv(self, array: Array, source: int) -> Call: ...
    def start_send(self, array: Array, to: int) -> Start: ...
    def start_recv(self, array: Array, source: int) -> Start: ...
    def leave(self) -> object: ...


class Distributed(World):
    """torch.distributed, or RankMesh, which has the same names.

    Args:
        dist: the module, with its default group made.
        version: of the library.
        tensor: makes of an array what the module takes; the memory stays the same.
        empty: makes an array, see World.
    """

    def __init__(
        self,
        dist: ModuleType,
        version: str,
        tensor: Callable[[Array], Any] = lambda array: array,
        empty: Callable[[int, np.dtype], Array] = np.empty,
    ) -> None:
        self.rank, self.size, self.version = dist.get_rank(), dist.get_world_size(), version
        self._dist, self._tensor, self.empty = dist, tensor, empty
        self.leave = dist.destroy_process_group

    def barrier(self) -> Call:
        return self._dist.barrier

    def all_reduce(self, array: Array) -> Call:
        return partial(self._dist.all_reduce, self._tensor(array))

    def start_all_reduce(self, array: Array) -> Start:
        return partial(self._dist.all_reduce, self._tensor(array), async_op=True)

    def broadcast(self, array: Array) -> Call:
        return partial(self._dist.broadcast, self._tensor(array), ROOT)

    def reduce(self, array: Array) -> Call:
        return partial(self._dist.reduce, self._tensor(array), ROOT)

    def all_gather(self, whole: Array, share: Array) -> Call:
        return partial(self._dist.all_gather_into_tensor, self._tensor(whole), self._tensor(share))

    def reduce_scatter(self, share: Array, whole: Array) -> Call:
        return partial(self._dist.reduce_scatter_tensor, self._tensor(share), self._tensor(whole))

    def all_to_all(self, output: Array, input: Array) -> Call:
        return partial(self._dist.all_to_all_single, self._tensor(output), self._tensor(input))

    def gather(self, whole: Array, share: Array) -> Call:
        return partial(self._dist.gather, self._tensor(share), self._blocks(whole), ROOT)

    def scatter(self, share: Array, whole: Array) -> Call:
        return partial(self._dist.scatter, self._tensor(share), self._blocks(whole), ROOT)

    def send(self, array: Array, to: int) -> Call:
        return partial(self._dist.send, self._tensor(array), to)

    def recv(self, array: Array, source: int) -> Call:
        return partial(self._dist.recv, self._tensor(array), source)

    def start_send(self, array: Array, to: int) -> Start:
        return partial(self._dist.isend, self._tensor(array), to)

    def start_recv(self, array: Array, source: int) -> Start:
        return partial(self._dist.irecv, self._tensor(array), source)

    def _blocks(self, whole: Array) -> list[Any] | None:
        return [self._tensor(block) for block in blocks(whole, self.size)] if self.rank == ROOT else None


class Mpi(World):
    """mpi4py's buffer calls on the communicator of all ranks."""

    empty = staticmethod(np.empty)

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self._world, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.size = self._world.rank, self._world.size
        self.version = f"{MPI.Get_library_version().split(',')[0]} through mpi4py {mpi4py.__version__}"
        self.leave = MPI.Finalize

    def barrier(self) -> Call:
        return self._world.Barrier

    def all_reduce(self, array: Array) -> Call:
        return partial(self._world.Allreduce, self._in_place, array)

    def start_all_reduce(self, array: Array) -> Start:
        return partial(self._world.Iallreduce, self._in_place, array)

    def broadcast(self, array: Array) -> Call:
        return partial(self._world.Bcast, array, ROOT)

    def reduce(self, array: Array) -> Call:
        if self.rank == ROOT:
            return partial(self._world.Reduce, self._in_place, array, root=ROOT)
        return partial(self._world.Reduce, array, None, root=ROOT)

    def all_gather(self, whole: Array, share: Array) -> Call:
        return partial(self._world.Allgather, share, whole)

    def reduce_scatter(self, share: Array, whole: Array) -> Call:
        return partial(self._world.Reduce_scatter_block, whole, share)

    def all_to_all(self, output: Array, input: Array) -> Call:
        return partial(self._world.Alltoall, input, output)

    def gather(self, whole: Array, share: Array) -> Call:
        return partial(self._world.Gather, share, whole if self.rank == ROOT else None, ROOT)

    def scatter(self, share: Array, whole: Array) -> Call:
        return partial(self._world.Scatter, whole if self.rank == ROOT else None, share, ROOT)

    def send(self, array: Array, to: int) -> Call:
        return partial(self._world.Send, array, to)

    def recv(self, array: Array, source: int) -> Call:
        return partial(self._world.Recv, array, source)

    def start_send(self, array: Array, to: int) -> Start:
        return partial(self._world.Isend, array, to)

    def start_recv(self, array: Array, source: int) -> Start:
        return partial(self._world.Irecv, array, source)


def blocks(whole: Array, size: int) -> Sequence[Array]:
    """Return an array's equal parts, one a rank."""
    return list(whole.reshape(size, -1))


def join_rankmesh() -> World:
    """Join as the launcher says; RANKMESH_TRANSPORT chooses shared memory or TCP."""
    import rankmesh as dist

    dist.init_process_group()
    return Distributed(dist, f"RankMesh {dist.__version__}")


def join_registered() -> World:
    """Join RankMesh, with arrays that lie in the group's shared memory."""
    import rankmesh as dist

    dist.init_process_group()
    return Distributed(dist, f"RankMesh {dist.__version__}", empty=dist.empty)


def join_attached() -> World:
    """Join RankMesh through a standalone agent, leased from the gateway that the environment names."""
    import rankmesh as dist

    dist.init_process_group(init_method=os.environ["RANKMESH_GATEWAY"])
    return Distributed(dist, f"RankMesh {dist.__version__}, attached")


def join_gloo() -> World:
    """Join torch's CPU backend as torchrun says; tensors share the arrays' memory."""
    import torch
    import torch.distributed as dist

    def tensor(array: Array) -> torch.Tensor:
        if array.dtype.name == "bfloat16":  # which torch does not know as NumPy's
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    dist.init_process_group("gloo")
    return Distributed(dist, f"gloo of torch {torch.__version__}", tensor)


JOIN: dict[str, Callable[[], World]] = {
    "rankmesh": join_rankmesh,
    "registered": join_registered,
    "attached": join_attached,
    "gloo": join_gloo,
    "mpi": Mpi,
}
