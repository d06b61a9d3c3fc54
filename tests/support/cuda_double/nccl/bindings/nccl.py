"""nccl4py's functions of NCCL: collectives that run on streams, once all ranks' streams have come to them.

The process that made a unique id has a hub, a thread that all ranks of the communicator are connected to: they give it
their data, it gives them their results. What does not match waits for ever, as does what a dead rank is missing from,
until ``comm_abort``; so does all, messages between others too, when the hub's process has ended. Ranks that share a GPU
are refused, unless all have NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import os
import threading
from collections import defaultdict
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import ml_dtypes
import numpy as np
from cupy import _gpus, _hub, _memory, _streams

_VERSION = 23_203
_DTYPES = [
    *map(np.dtype, ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
]
_ID_BYTES = 128
_SUM, _AVG = 0, 4
_SYSTEM, _INVALID_ARGUMENT, _INVALID_USAGE, _REMOTE = 2, 4, 5, 6
_TEXTS = {
    _SYSTEM: "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    _INVALID_ARGUMENT: "invalid argument (run with NCCL_DEBUG=WARN for details)",
    _INVALID_USAGE: "invalid usage (run with NCCL_DEBUG=WARN for details)",
    _REMOTE: "remote process exited or there was a network error",
}
_NAMES = {_SYSTEM: "SystemError", _INVALID_ARGUMENT: "InvalidArgument", _INVALID_USAGE: "InvalidUsage"}
_factors: dict[int, Any] = {}
"""The factors of operations of ``red_op_create_pre_mul_sum``, until they are destroyed."""
_operations = itertools.count(16)


class NCCLError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{_NAMES.get(status, 'RemoteError')} ({status}): {_TEXTS[status]}")


class DataType(enum.IntEnum):
    Float32 = 7


class RedOp(enum.IntEnum):
    Sum = 0


class UniqueId:
    _data = bytes(_ID_BYTES)

    @staticmethod
    def from_buffer(buffer: Any) -> UniqueId:
        if memoryview(buffer).nbytes != _ID_BYTES:
            raise ValueError("wrong size")
        made = UniqueId()
        made._data = bytes(buffer)
        return made

    def __bytes__(self) -> bytes:
        return self._data


class Comm:
    """A rank's side of a communicator; ``connection`` is None once it has ended."""

    def __init__(self, handle: int = 0) -> None:
        self.connection: Connection | None = None
        self.aborted = threading.Event()
        self.tail: list[_streams.Mark] = []
        self.size = self.rank = 0
        self.gpu: Any = None


class _Group(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.calls: dict[Comm, list[tuple[tuple[_hub.Call, int, int, Any], _streams.Queue]]] = defaultdict(list)


_group = _Group()


def get_version() -> int:
    if "nccl" in _gpus.WITHOUT:
        raise RuntimeError('Failure finding "libnccl.so.2": No such file: libnccl.so.2')
    return _VERSION


def get_library_path() -> str:
    return "/double/libnccl.so.2"


def get_error_string(result: int) -> str:
    return _TEXTS[result]


def get_last_error(comm: Comm) -> str:
    return ""


def get_unique_id() -> UniqueId:
    key = os.urandom(16)
    listener = Listener(("127.0.0.1", 0), backlog=_ID_BYTES, authkey=key)
    threading.Thread(target=_hub.serve, args=(listener,), name="cuda-double-hub", daemon=True).start()
    return UniqueId.from_buffer(f"{listener.address[1]}:{key.hex()}".encode().ljust(_ID_BYTES, b"\0"))


def group_start() -> None:
    _group.depth += 1


def group_end() -> None:
    if not _group.depth:
        raise NCCLError(_INVALID_USAGE)
    _group.depth -= 1
    if not _group.depth:
        calls, _group.calls = _group.calls, defaultdict(list)
        for comm, made in calls.items():
            _enqueue(comm, made)


def comm_init_rank(nranks: int, comm_id: UniqueId, rank: int) -> Comm:
    """Connect to the hub, and wait until all ranks are there."""
    if not 0 <= rank < nranks:
        raise NCCLError(_INVALID_ARGUMENT)
    comm = Comm()
    comm.size, comm.rank, comm.gpu = nranks, rank, _gpus.gpu()
    port, key = bytes(comm_id).rstrip(b"\0").decode().split(":")
    # Ranks that may share a GPU are told apart.
    place = comm.gpu.bus, rank if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else -1
    try:
        comm.connection = Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key))
        comm.connection.send((rank, nranks, os.getpid(), place))
    except (OSError, EOFError) as error:
        raise NCCLError(_SYSTEM) from error
    try:
        status = comm.connection.recv()
    except (OSError, EOFError) as error:
        raise NCCLError(_REMOTE) from error
    if status:
        raise NCCLError(status)
    return comm


def comm_get_async_error(comm: Comm) -> int:
    _check(comm.connection is not None)
    return 0


def comm_destroy(comm: Comm) -> None:
    for mark in comm.tail:
        mark.wait()
    comm.connection = None


def comm_abort(comm: Comm) -> None:
    comm.aborted.set()
    comm.connection = None  # what runs has it still, and closes it


def red_op_create_pre_mul_sum(scalar: int, datatype: int, residence: int, comm: Comm) -> int:
    _check(residence == 1 and comm.connection is not None)
    dtype, number = _DTYPES[datatype], next(_operations)
    _factors[number] = np.frombuffer(ctypes.string_at(scalar, dtype.itemsize), dtype)
    return number


def red_op_destroy(op: int, comm: Comm) -> None:
    _check(_factors.pop(op, None) is not None)


def all_reduce(sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Comm, stream: int) -> None:
    _call(comm, "allReduce", sendbuff, recvbuff, count, datatype, stream, op=op)


def reduce(
    sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: Comm, stream: int
) -> None:
    _call(comm, "reduce", sendbuff, recvbuff, count, datatype, stream, op=op, peer=root)


def broadcast(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Comm, stream: int) -> None:
    _call(comm, "broadcast", sendbuff, recvbuff, count, datatype, stream, peer=root)


def reduce_scatter(
    sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Comm, stream: int
) -> None:
    _call(comm, "reduceScatter", sendbuff, recvbuff, recvcount, datatype, stream, op=op)


def all_gather(sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Comm, stream: int) -> None:
    _call(comm, "allGather", sendbuff, recvbuff, sendcount, datatype, stream)


def send(sendbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
    _call(comm, "send", sendbuff, 0, count, datatype, stream, peer=peer)


def recv(recvbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
    _call(comm, "recv", 0, recvbuff, count, datatype, stream, peer=peer)


def _check(valid: bool) -> None:
    if not valid:
        raise NCCLError(_INVALID_ARGUMENT)


def _call(
    comm: Comm, kind: str, source: int, to: int, count: int, datatype: int, stream: int, op: int = _SUM, peer: int = 0
) -> None:
    _check(comm.connection is not None)
    queue = _streams.stream(stream) if stream not in (0, 1) else comm.gpu.queues[0]
    factor = _factors.get(op)
    _check(0 <= datatype < len(_DTYPES) and (factor is not None or _SUM <= op <= _AVG))
    _check(0 <= peer < comm.size and queue.gpu is comm.gpu)
    call = _hub.Call(kind, count, _DTYPES[datatype], _SUM if factor is not None else op, peer)
    _group.calls[comm].append(((call, source, to, factor), queue))
    if not _group.depth:
        group_start()
        group_end()


def _enqueue(comm: Comm, made: list[Any]) -> None:
    """Run calls together, on the first's stream; the other streams wait, and are waited for."""
    calls = [call for call, _ in made]
    first, *others = dict.fromkeys(queue for _, queue in made)
    connection: Any = comm.connection
    mark = first.enqueue(lambda: _carry_out(comm, calls, connection), [*comm.tail, *(queue.tail for queue in others)])
    comm.tail = [mark, *(queue.enqueue(lambda: None, [mark]) for queue in others)]


def _carry_out(comm: Comm, calls: list[tuple[_hub.Call, int, int, Any]], connection: Connection) -> None:
    given = [(call, _given(comm, call, source, factor)) for call, source, _, factor in calls]
    results: Any = None
    try:
        connection.send(given)
        while results is None and not comm.aborted.is_set():
            results = connection.recv() if connection.poll(0.01) else None
    except (OSError, EOFError):  # the hub's process has died; it is rank 0's, say, and does not answer
        comm.aborted.wait()
    for (_, _, to, _), result in zip(calls, results or (), strict=False):
        if result is not None:
            _memory.view(to, len(result))[:] = np.frombuffer(result, np.uint8)


def _given(comm: Comm, call: _hub.Call, source: int, factor: Any) -> bytes:
    if call.kind == "recv" or (call.kind == "broadcast" and call.peer != comm.rank):
        return b""
    data = _memory.view(source, call.count * (comm.size if call.kind == "reduceScatter" else 1), call.dtype)
    with np.errstate(all="ignore"):
        return (data if factor is None else data * factor).tobytes()
