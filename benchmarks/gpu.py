"""all_reduce of arrays on GPUs: NCCL beside its bare calls; host memory beside a copy on the same GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.adapters import Adapter
from benchmarks.cases import KIB, MIB, Case, Effort
from benchmarks.implementations import RANKMESH, Implementation
from benchmarks.results import Results
from benchmarks.rounds import in_rounds, progress
from benchmarks.workers import WorkerGroup

SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
RANKS = (2, 4)
_ARRAYS = 6
"""Arrays that a rank of each implementation, together, may need room for."""
NCCL, BARE, STAGED, COPY = (
    Implementation(name, title, library, "cupy", RANKMESH)
    for name, title, library in (
        ("rankmesh-nccl", "RankMesh over NCCL", "nccl"),
        ("nccl", "NCCL, bare", "bare-nccl"),
        ("rankmesh-staged", "RankMesh through host memory", "staged"),
        ("gpu-copy", "a copy on the GPU, by one process", "copy"),
    )
)


def measure(rounds: int, ranks: Sequence[int], sizes: Sequence[int], results: Results) -> list[str]:
    """Measure all_reduce, and return a line about each part that cannot be measured here."""
    from rankmesh_agent.device import runtime as cuda

    reason = cuda.unavailable_reason()
    if reason:
        return [f"GPUs are left out: {reason}."]
    from cupy.cuda import runtime

    left_out, effort = [], Effort(rounds, least=min(3, rounds), budget=10.0, repetitions=2, most_calls=200)
    no_nccl = cuda.nccl_unavailable_reason()
    if no_nccl:
        left_out.append(f"{NCCL.title} is left out: {no_nccl}.")
    else:
        count, chosen = runtime.getDeviceCount(), [nbytes for nbytes in sizes if nbytes <= 256 * MIB]
        _measure([(NCCL, count), (BARE, count)], count, chosen, effort, results)
    for count in ranks:
        fitting = runtime.getDeviceProperties(0)["totalGlobalMem"] // (count * _ARRAYS)
        chosen = [nbytes for nbytes in sizes if nbytes <= fitting]
        _measure([(STAGED, count), (COPY, 1)], count, chosen, effort, results)
    return left_out


def _measure(
    started: Sequence[tuple[Implementation, int]], ranks: int, sizes: Sequence[int], effort: Effort, results: Results
) -> None:
    progress(f"GPU, {ranks} ranks: starting {', '.join(one.title for one, _ in started)}")
    with ExitStack() as stack:
        groups = [stack.enter_context(WorkerGroup(one, count)) for one, count in started]
        results.versions |= {group.implementation.name: group.version for group in groups}
        if sizes:
            in_rounds(groups, {Case("all_reduce", ranks, nbytes): effort for nbytes in sizes}, results)


def join(library: str) -> Adapter:
    """Join RankMesh with arrays on a GPU, on a stream of their own."""
    import cupy
    from cupy.cuda import runtime

    import rankmesh as dist

    dist.init_process_group("nccl" if library == "nccl" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cupy.cuda.Device(rank if "nccl" in library else 0).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    dist.all_reduce(cupy.zeros(1, "float32"))  # upon which the ranks select a backend

    def all_reduce(array: Any) -> Callable[[], Any]:
        place = array.data.ptr
        if library == "bare-nccl":
            return bare_all_reduce(dist, array, stream.ptr)
        if library == "copy":
            kind, other = runtime.memcpyDeviceToDevice, cupy.empty_like(array)
            return lambda: runtime.memcpyAsync(other.data.ptr, place, array.nbytes, kind, stream.ptr)
        return partial(dist.all_reduce, array)

    version = f"RankMesh {dist.__version__}, {dist.get_backend_config()}"
    calls: dict[str, Callable[..., Callable[[], Any]]] = {"barrier": lambda: dist.barrier, "all_reduce": all_reduce}
    return Adapter(rank, size, version, calls, dist.destroy_process_group, cupy.empty, stream.synchronize)


def bare_all_reduce(dist: Any, array: Any, stream: int) -> Callable[[], Any]:
    """Return a call of NCCL's own all_reduce of float32, over a communicator of the same ranks."""
    from rankmesh_agent.device import runtime as cuda

    nccl, rank, place = cuda.nccl(), dist.get_rank(), array.data.ptr
    name = [bytes(nccl.get_unique_id()) if rank == 0 else None]
    dist.broadcast_object_list(name, 0)
    comm = nccl.comm_init_rank(dist.get_world_size(), nccl.UniqueId.from_buffer(name[0]), rank)
    kind, op = int(nccl.DataType.Float32), int(nccl.RedOp.Sum)
    return partial(nccl.all_reduce, place, place, array.size, kind, op, comm, stream)
