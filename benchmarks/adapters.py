"""The libraries as a rank sees them: how it joins, and the calls a user would write on NumPy arrays.

Every entry of ``Adapter.calls`` takes arrays and returns the call to be timed. Imports are inside of the functions: a
rank loads the library it measures and no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

Array = np.ndarray
Call = Callable[[], Any]

ROOT = 0
"""The rank that has the whole array in rooted operations."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A rank's view of the world it has joined.

    Attributes:
        calls: by name, makes the call to be timed from its arrays; ``start_...`` return a Work or a Request.
        leave: leaves the world.
        empty: allocates an array; every rank allocates the same ones in the same order.
        finish: waits until what the calls have begun is over.
    """

    rank: int
    size: int
    version: str
    calls: Mapping[str, Callable[..., Call]]
    leave: Callable[[], object]
    empty: Callable[[int, np.dtype], Any] = np.empty
    finish: Callable[[], object] = lambda: None


def blocks(whole: Array, size: int) -> Sequence[Array]:
    """Return the equal parts of an array, one a rank."""
    return list(whole.reshape(size, -1))


def distributed(
    dist: ModuleType, version: str, tensor: Callable[[Array], Any] = lambda array: array, **options: Any
) -> Adapter:
    """Return the adapter of torch.distributed, or of RankMesh, which has the same names.

    ``tensor`` converts an array to what the module takes, over the same memory; ``options`` are further fields.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def parts(whole: Array) -> list[Any] | None:
        return [tensor(block) for block in blocks(whole, size)] if rank == ROOT else None

    def call(name: str, *arguments: Any, **keywords: Any) -> Call:
        converted = [tensor(each) if isinstance(each, np.ndarray) else each for each in arguments]
        return partial(getattr(dist, name), *converted, **keywords)

    calls: dict[str, Callable[..., Call]] = {
        "barrier": lambda: dist.barrier,
        "all_reduce": lambda array: call("all_reduce", array),
        "start_all_reduce": lambda array: call("all_reduce", array, async_op=True),
        "broadcast": lambda array: call("broadcast", array, ROOT),
        "reduce": lambda array: call("reduce", array, ROOT),
        "all_gather": lambda whole, share: call("all_gather_into_tensor", whole, share),
        "reduce_scatter": lambda share, whole: call("reduce_scatter_tensor", share, whole),
        "all_to_all": lambda output, input: call("all_to_all_single", output, input),
        "gather": lambda whole, share: call("gather", share, parts(whole), ROOT),
        "scatter": lambda share, whole: call("scatter", share, parts(whole), ROOT),
        "send": lambda array, to: call("send", array, to),
        "recv": lambda array, source: call("recv", array, source),
        "store": lambda: partial(connect_store, dist),
    }
    return Adapter(rank, size, version, calls, dist.destroy_process_group, **options)


def connect_store(dist: ModuleType, timeout: timedelta = timedelta(seconds=60)) -> Any:
    """Return a TCPStore that rank 0 serves to all ranks; collective."""
    port = [0]
    if dist.get_rank() == ROOT:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, False)
        port = [store.port]
    dist.broadcast_object_list(port, ROOT)
    return store if dist.get_rank() == ROOT else dist.TCPStore("127.0.0.1", port[0], None, False, timeout, False)


def join_mpi() -> Adapter:
    """Join the communicator of all ranks; the calls are mpi4py's buffer calls."""
    import mpi4py
    from mpi4py import MPI

    comm, in_place, at_root = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.COMM_WORLD.rank == ROOT
    version = f"{MPI.Get_library_version().split(',')[0]} through mpi4py {mpi4py.__version__}"
    calls: dict[str, Callable[..., Call]] = {
        "barrier": lambda: comm.Barrier,
        "all_reduce": lambda array: partial(comm.Allreduce, in_place, array),
        "start_all_reduce": lambda array: partial(comm.Iallreduce, in_place, array),
        "broadcast": lambda array: partial(comm.Bcast, array, ROOT),
        "reduce": lambda array: partial(comm.Reduce, *((in_place, array) if at_root else (array, None)), root=ROOT),
        "all_gather": lambda whole, share: partial(comm.Allgather, share, whole),
        "reduce_scatter": lambda share, whole: partial(comm.Reduce_scatter_block, whole, share),
        "all_to_all": lambda output, input: partial(comm.Alltoall, input, output),
        "gather": lambda whole, share: partial(comm.Gather, share, whole if at_root else None, ROOT),
        "scatter": lambda share, whole: partial(comm.Scatter, whole if at_root else None, share, ROOT),
        "send": lambda array, to: partial(comm.Send, array, to),
        "recv": lambda array, source: partial(comm.Recv, array, source),
    }
    return Adapter(comm.rank, comm.size, version, calls, MPI.Finalize)


def join_rankmesh(library: str) -> Adapter:
    """Join RankMesh: as its launcher directs, over MPI, or through a standalone agent of the gateway."""
    import rankmesh as dist

    if library == "attached":
        dist.init_process_group(init_method=os.environ["RANKMESH_GATEWAY"])
    else:
        dist.init_process_group("mpi" if library == "rankmesh-mpi" else None)
    options = {"empty": dist.empty} if library == "registered" else {}
    return distributed(dist, f"RankMesh {dist.__version__}", **options)


def join_gloo() -> Adapter:
    """Join torch's CPU backend as torchrun directs; tensors share the arrays' memory."""
    import torch
    import torch.distributed as dist

    def tensor(array: Array) -> torch.Tensor:
        if array.dtype.name == "bfloat16":  # torch does not know NumPy's
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    dist.init_process_group("gloo")
    return distributed(dist, f"gloo of torch {torch.__version__}", tensor)


JOIN: dict[str, Callable[[], Adapter]] = {
    **{name: partial(join_rankmesh, name) for name in ("rankmesh", "registered", "attached", "rankmesh-mpi")},
    "gloo": join_gloo,
    "mpi": join_mpi,
}
