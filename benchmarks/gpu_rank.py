"""The program of a rank with arrays on a GPU, which times all_reduce when told to.

LAUNCHER python -m benchmarks.gpu_rank LIBRARY SOCKET
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Event, get_current_stream, get_elapsed_time, nccl, runtime

import rankmesh as dist
from benchmarks.channel import Channel
from benchmarks.rank import LIFETIME
from benchmarks.worlds import Call

BACKENDS = {"nccl": "nccl", "ipc": None, "staged": "gloo", "copy": "gloo"}
"""What is asked for, by the name of the library; CUDA IPC is what the default comes to on one GPU."""
WARM_UP = 20
"""Calls before memory is looked at, in which pools become as large as they will."""


def timed(call: Call, calls: int) -> list[float]:
    """Return the seconds a call takes the host, and all that a call takes, between events on the current stream."""
    begin, end, stream = Event(), Event(), get_current_stream()
    stream.synchronize()
    dist.barrier()
    begin.record(stream)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - began
    end.record(stream)
    end.synchronize()
    milliseconds = max(get_elapsed_time(begin, end), 1e-6)  # so that nothing is divided by 0
    return [host / calls, 1e-3 * milliseconds / calls]


def all_reduce(library: str, nbytes: int, calls: int, repetitions: int) -> list[float]:
    """Return the seconds of an all_reduce for each repetition; of a copy of the array where that is the library."""
    array = cupy.zeros(nbytes // 4, "float32")
    call: Call = partial(dist.all_reduce, array)
    if library == "copy":
        to, stream = cupy.empty_like(array), get_current_stream().ptr
        places = to.data.ptr, array.data.ptr
        call = partial(runtime.memcpyAsync, *places, nbytes, runtime.memcpyDeviceToDevice, stream)
    timed(call, max(1, calls // 10))
    return [timed(call, calls)[1] for _ in range(repetitions)]


def beside_bare(library: str, nbytes: int, calls: int, repetitions: int) -> list[list[float]]:
    """Return for each repetition what ``timed`` returns of our all_reduce, then of NCCL's, on the same stream."""
    array = cupy.zeros(nbytes // 4, "float32")
    pointer, stream = array.data.ptr, get_current_stream().ptr
    ours = partial(dist.all_reduce, array)
    bare = partial(_bare().allReduce, pointer, pointer, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
    for call in (ours, bare):
        timed(call, max(1, calls // 10))
    found = []
    for number in range(repetitions):  # another one is first in each
        pair = [timed(call, calls) for call in ((bare, ours) if number % 2 else (ours, bare))]
        found.append([figure for figures in (pair[::-1] if number % 2 else pair) for figure in figures])
    return found


@cache
def _bare() -> Any:
    """Return a communicator of the same ranks."""
    name = [bytes(nccl.get_unique_id()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, 0)
    return nccl.NcclCommunicator(dist.get_world_size(), name[0], dist.get_rank())


def check(library: str, nbytes: int, calls: int, repetitions: int) -> list[list[float]]:
    """Compare every element of so many all_reduces with what CuPy says, all of it enqueued on the current stream.

    Nothing waits for the GPU from the first call to the last. The sums are of whole numbers, which float32 has exactly.

    Returns:
        How many bytes CuPy's pool grew by, and how many the device has less that are free.

    Raises:
        ArithmeticError: an element is wrong.
    """
    rank, size, pool = dist.get_rank(), dist.get_world_size(), cupy.get_default_memory_pool()
    pattern = cupy.asarray((np.arange(nbytes // 4) % 251).astype(np.float32))
    total = pattern * (size * (size + 1) // 2)
    array, wrong = cupy.empty_like(pattern), cupy.zeros((), "int64")

    def made(count: int) -> tuple[int, int]:
        """Fill, reduce and compare so often; return what memory is taken then."""
        for number in range(count):
            array[...] = pattern * (rank + 1) + number
            work = dist.all_reduce(array, async_op=bool(number % 2))
            if work is not None:
                work.wait()
            wrong[...] = wrong + (array != total + size * number).sum()
        get_current_stream().synchronize()
        dist.barrier()
        return pool.total_bytes(), -runtime.memGetInfo()[0]

    before, after = made(WARM_UP), made(calls)
    if int(wrong):
        raise ArithmeticError(f"rank {rank} of {size}: {int(wrong)} elements of {calls} all_reduces are wrong")
    return [[float(now - then) for then, now in zip(before, after, strict=True)]]


ORDERS = {"gpu_all_reduce": all_reduce, "gpu_nccl": beside_bare, "gpu_check": check}


def main(library: str, path: str) -> None:
    """Join, and obey until the benchmark closes the socket."""
    signal.alarm(LIFETIME)
    channel = Channel.connect(Path(path))
    said: list[str] = []
    listening = logging.Handler()
    listening.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rankmesh").addHandler(listening)
    dist.init_process_group(BACKENDS[library])
    cupy.cuda.Device(dist.get_rank() if library == "nccl" else 0).use()
    with cupy.cuda.Stream(non_blocking=True):
        dist.all_reduce(cupy.zeros(1, "float32"))  # upon which the ranks find out what carries it
        version = "; ".join([f"RankMesh {dist.__version__}", dist.get_backend_config(), *said])
        channel.send({"rank": dist.get_rank(), "size": dist.get_world_size(), "version": version})
        while (order := channel.receive()) is not None:
            channel.send({"seconds": ORDERS[order.pop("operation")](library, **order)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
