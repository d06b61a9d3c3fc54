"""NCCL: collectives that run on streams, once all ranks' streams have come to them.

The process that made a unique id has a hub, a thread that all ranks of the communicator are connected to: they give it
their data, it gives them their results. What does not match waits for ever, as does what a dead rank is missing from,
until ``abort``; so does all, messages between others too, when the hub's process has ended.
"""

# ruff: noqa: N802, N803

from __future__ import annotations

import os
import threading
from collections import defaultdict
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import ml_dtypes
import numpy as np

from cupy import _gpus, _hub, _memory, _streams

available = "nccl" not in _gpus.WITHOUT

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9

_DTYPES = [
    *map(np.dtype, ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
]
_ID_BYTES = 128
_SYSTEM, _INVALID_ARGUMENT, _INVALID_USAGE, _REMOTE = 2, 4, 5, 6
_TEXTS = {
    _SYSTEM: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    _INVALID_ARGUMENT: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    _INVALID_USAGE: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
    _REMOTE: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_TEXTS[status])


def get_version() -> int:
    return 23_203


def get_unique_id() -> bytes:
    key = os.urandom(16)
    listener = Listener(("127.0.0.1", 0), backlog=_ID_BYTES, authkey=key)
    threading.Thread(target=_hub.serve, args=(listener,), name="cuda-double-hub", daemon=True).start()
    return f"{listener.address[1]}:{key.hex()}".encode().ljust(_ID_BYTES, b"\0")


class _Group(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.starting: list[NcclCommunicator] = []
        self.calls: dict[NcclCommunicator, list[tuple[_hub.Call, _streams.Queue]]] = defaultdict(list)


_group = _Group()


def groupStart() -> None:
    _group.depth += 1


def groupEnd() -> None:
    if not _group.depth:
        raise NcclError(_INVALID_USAGE)
    _group.depth -= 1
    if _group.depth:
        return
    starting, calls = _group.starting, _group.calls
    _group.starting, _group.calls = [], defaultdict(list)
    for communicator in starting:
        communicator._meet()
    for communicator, made in calls.items():
        communicator._enqueue(made)


class NcclCommunicator:
    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        if not 0 <= rank < ndev:
            raise NcclError(_INVALID_ARGUMENT)
        self._size, self._rank, self._gpu = ndev, rank, _gpus.gpu()
        self._aborted = threading.Event()
        self._tail: list[_streams.Mark] = []
        self._connection: Connection | None = None
        port, key = commId.rstrip(b"\0").decode().split(":")
        try:
            self._connection = Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key))
            self._connection.send((rank, ndev, os.getpid(), self._gpu.bus))
        except (OSError, EOFError) as error:
            raise NcclError(_SYSTEM) from error
        if _group.depth:
            _group.starting.append(self)
        else:
            self._meet()

    def _meet(self) -> None:
        """Wait until all ranks are there."""
        assert self._connection is not None
        try:
            status = self._connection.recv()
        except (OSError, EOFError) as error:
            raise NcclError(_REMOTE) from error
        if status:
            self._connection = None
            raise NcclError(status)

    @property
    def comm(self) -> int:
        return id(self) if self._connection is not None else 0

    def size(self) -> int:
        return self._size if self._alive() else 0

    def device_id(self) -> int:
        return self._gpu.number if self._alive() else 0

    def check_async_error(self) -> None:
        self._alive()

    def destroy(self) -> None:
        if self._connection is not None:
            for mark in self._tail:
                mark.wait()
            self._connection = None

    def abort(self) -> None:
        self._aborted.set()
        self._connection = None  # what runs has it still, and closes it

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._call("allReduce", sendbuf, recvbuf, count, datatype, stream, op=op)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._call("reduce", sendbuf, recvbuf, count, datatype, stream, op=op, peer=root)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._call("broadcast", sendbuff, recvbuff, count, datatype, stream, peer=root)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._call("reduceScatter", sendbuf, recvbuf, recvcount, datatype, stream, op=op)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._call("allGather", sendbuf, recvbuf, count, datatype, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("send", sendbuf, 0, count, datatype, stream, peer=peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("recv", 0, recvbuf, count, datatype, stream, peer=peer)

    def _alive(self) -> bool:
        if self._connection is None:
            raise NcclError(_INVALID_ARGUMENT)
        return True

    def _call(
        self, kind: str, source: int, to: int, count: int, datatype: int, stream: int, op: int = 0, peer: int = 0
    ) -> None:
        self._alive()
        queue = _streams.stream(stream) if stream not in (0, 1) else self._gpu.queues[0]
        known = 0 <= datatype < len(_DTYPES) and NCCL_SUM <= op <= NCCL_AVG and 0 <= peer < self._size
        if not known or queue.gpu is not self._gpu:
            raise NcclError(_INVALID_ARGUMENT)
        call = _hub.Call(kind, count, _DTYPES[datatype], op, peer), source, to
        _group.calls[self].append((call, queue))
        if not _group.depth:
            groupStart()
            groupEnd()

    def _enqueue(self, made: list[Any]) -> None:
        """Run calls together, on the first's stream; the other streams wait, and are waited for."""
        calls = [call for call, _ in made]
        first, *others = dict.fromkeys(queue for _, queue in made)
        connection: Any = self._connection
        mark = first.enqueue(
            lambda: self._carry_out(calls, connection), [*self._tail, *(queue.tail for queue in others)]
        )
        self._tail = [mark, *(queue.enqueue(lambda: None, [mark]) for queue in others)]

    def _carry_out(self, calls: list[tuple[_hub.Call, int, int]], connection: Connection) -> None:
        given = [(call, self._given(call, source)) for call, source, _ in calls]
        results: Any = None
        try:
            connection.send(given)
            while results is None and not self._aborted.is_set():
                results = connection.recv() if connection.poll(0.01) else None
        except (OSError, EOFError):  # the hub's process has died; it is rank 0's, say, and does not answer
            self._aborted.wait()
        for (_, _, to), result in zip(calls, results or (), strict=False):
            if result is not None:
                _memory.view(to, len(result))[:] = np.frombuffer(result, np.uint8)

    def _given(self, call: _hub.Call, source: int) -> bytes:
        if call.kind == "recv" or (call.kind == "broadcast" and call.peer != self._rank):
            return b""
        count = call.count * (self._size if call.kind == "reduceScatter" else 1)
        return _memory.view(source, count * call.dtype.itemsize).tobytes()
