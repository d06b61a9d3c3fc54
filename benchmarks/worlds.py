"""The libraries as seen from a rank: how it joins, and the call a user would write to all-reduce an array in place.

Imports are inside of the functions: a rank loads the library it measures and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

Call = Callable[[], object]


class World(NamedTuple):
    """A rank's view of the world it has joined.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        version: of the library that is measured.
        all_reduce: takes an array and returns the call that replaces it by its sum over all ranks.
        leave: ends the membership.
    """

    rank: int
    size: int
    version: str
    all_reduce: Callable[[np.ndarray], Call]
    leave: Call


def join_rankmesh() -> World:
    """Join as the launcher says; RANKMESH_TRANSPORT chooses shared memory or TCP."""
    import rankmesh as dist

    dist.init_process_group()
    return World(
        dist.get_rank(),
        dist.get_world_size(),
        f"RankMesh {dist.__version__}",
        lambda array: partial(dist.all_reduce, array),
        dist.destroy_process_group,
    )


def join_gloo() -> World:
    """Join torch's CPU backend as torchrun says; the tensor shares the array's memory."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return World(
        dist.get_rank(),
        dist.get_world_size(),
        f"gloo of torch {torch.__version__}",
        lambda array: partial(dist.all_reduce, torch.from_numpy(array)),
        dist.destroy_process_group,
    )


def join_mpi() -> World:
    """Join as mpirun says."""
    import mpi4py
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    library = MPI.Get_library_version().split(",")[0]
    return World(
        world.rank,
        world.size,
        f"{library} through mpi4py {mpi4py.__version__}",
        lambda array: partial(world.Allreduce, MPI.IN_PLACE, array),
        MPI.Finalize,
    )


JOIN: dict[str, Callable[[], World]] = {"rankmesh": join_rankmesh, "gloo": join_gloo, "mpi": join_mpi}
