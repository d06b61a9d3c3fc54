"""Media of the tables of calls beside ``rankmesh`` itself: functions of its API, for one rank, over something else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np

from rankmesh._collectives.coalescing import CallRecorder
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import PremulSum, ReduceOp
from support.http_ranks import applications, clients, from_npy, from_raw, npy
from support.sweep.containers import Array
from support.threads import LATER, NOW, World

ANY = -1
SUM = ReduceOp.SUM
POOL_BYTES = 1 << 22
"""Registered bytes of each rank."""
RAW, NPY = "application/octet-stream", "application/x-npy"


class Pool:
    """Registered memory of one rank: arrays are put there in turn, every other one with ``half``."""

    def __init__(self, comm: Any, half: bool = False, nbytes: int = POOL_BYTES) -> None:
        self._memory = comm.empty(np.dtype(np.uint8), nbytes, NOW)
        self._nbytes = nbytes
        self._half = half
        self._taken = self._placed = 0

    def put(self, array: Array) -> Array:
        self._placed += 1
        if self._half and self._placed % 2:
            return array.copy()
        room = -(-array.nbytes // 64) * 64
        begin = self._taken if self._taken + room <= self._nbytes else 0
        self._taken = begin + room
        placed: Array = self._memory[begin : begin + array.nbytes].view(array.dtype)
        placed[:] = array
        return placed


class OverCommunicator:
    """A rank's communicator: collectives and messages of one-dimensional, contiguous arrays."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def get_rank(self, group: None) -> int:
        return int(self._comm.rank)

    def get_world_size(self, group: None) -> int:
        return int(self._comm.size)

    def get_process_group_ranks(self, group: None) -> list[int]:
        return list(range(self._comm.size))

    def __getattr__(self, name: str) -> Any:
        """Return a collective: its arrays, op and root, in this order, are those of the communicator's method."""
        method = getattr(self._comm, name.removesuffix("_v").removesuffix("_single"))

        reduces = name.startswith(("all_reduce", "reduce"))

        def call(*arrays: Any, group: None = None, async_op: bool = False, op: Any = SUM, **root: int) -> Any:
            if name in ("gather", "scatter"):
                arrays = arrays[::-1] if name == "gather" else arrays
                arrays = tuple([] if each is None else each for each in arrays)
            if name == "reduce_scatter_single":
                arrays = (arrays[0], list(arrays[1]))
            return method(*arrays, *([op] if reduces else []), *root.values(), LATER if async_op else NOW)

        return call

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        recorder = CallRecorder(self._comm)
        yield
        recorder.close(NOW)

    def isend(self, tensor: Array, dst: int, group: None, tag: int) -> Any:
        return self._comm.send(tensor, dst, tag, LATER)

    def irecv(self, tensor: Array, src: int | None, group: None, tag: int) -> Any:
        return self._comm.receive(tensor, ANY if src is None else src, tag, LATER)

    def send(self, tensor: Array, group: None, tag: int, group_dst: int) -> None:
        self._comm.send(tensor, group_dst, tag, NOW)

    def recv(self, tensor: Array, src: int | None, group: None, tag: int) -> Any:
        return self._comm.receive(tensor, ANY if src is None else src, tag, NOW)


class HttpProblemError(Exception):
    """A response that is a problem.

    Attributes:
        problem: its status and code.
        op: the call.
    """

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.headers["Content-Type"] == "application/problem+json", answer.text
        document = answer.json()
        assert document["status"] == answer.status_code
        super().__init__(document["detail"])
        self.problem, self.op = [answer.status_code, document["code"]], document.get("op")


class OverHttp:
    """The HTTP endpoints of a rank's agent: collectives and messages.

    Args:
        rank: the rank.
        size: how many there are.
        client: of its agent.
        loop: runs the client; calls are made in other threads.
        form: media type of the arrays.
    """

    def __init__(
        self, rank: int, size: int, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop, form: str = RAW
    ) -> None:
        self._rank, self._size, self._client, self._loop, self._form = rank, size, client, loop, form

    def get_rank(self, group: None) -> int:
        return self._rank

    def get_world_size(self, group: None) -> int:
        return self._size

    def get_process_group_ranks(self, group: None) -> list[int]:
        return list(range(self._size))

    def all_reduce(self, tensor: Array, op: Any = SUM, **options: Any) -> None:
        self._fill([tensor], self._make("all_reduce", tensor, options, op=op))

    def reduce(self, tensor: Array, op: Any = SUM, **options: Any) -> None:
        self._fill([tensor], self._make("reduce", tensor, options, op=op, dst=_root(options)))

    def broadcast(self, tensor: Array, **options: Any) -> None:
        self._fill([tensor], self._make("broadcast", tensor, options, src=_root(options)))

    def all_gather(self, tensors: Sequence[Array], tensor: Array, **options: Any) -> None:
        self._fill(tensors, self._make("all_gather", tensor, options))

    def gather(self, tensor: Array, tensors: Sequence[Array] | None, **options: Any) -> None:
        self._fill(tensors or [], self._make("gather", tensor, options, dst=_root(options)))

    def scatter(self, tensor: Array, tensors: Sequence[Array] | None, **options: Any) -> None:
        stack = np.stack(tensors) if tensors else tensor
        self._fill([tensor], self._make("scatter", stack, options, src=_root(options)))

    def reduce_scatter(self, tensor: Array, tensors: Sequence[Array], op: Any = SUM, **options: Any) -> None:
        self._fill([tensor], self._make("reduce_scatter", np.stack(tensors), options, op=op))

    def all_to_all(self, outputs: Sequence[Array], inputs: Sequence[Array], **options: Any) -> None:
        self._fill(outputs, self._make("all_to_all", np.stack(inputs), options))

    def barrier(self, **options: Any) -> None:
        self._make("barrier", None, options)

    def send(self, tensor: Array, dst: int | None = None, tag: int = 0, **options: Any) -> None:
        self._make("send", tensor, options, dst=dst, tag=tag)

    def recv(self, tensor: Array, src: int | None = None, tag: int = 0, **options: Any) -> None:
        self._fill([tensor], self._make("recv", tensor, options, src=src, tag=tag))

    def _make(
        self, name: str, array: Array | None, options: dict[str, Any], op: Any = None, **query: Any
    ) -> Array | None:
        headers, body = {"Content-Type": self._form}, b""
        if array is not None and self._form == RAW:
            body = array.tobytes()
            query |= {"dtype": display(array.dtype), "shape": ",".join(map(str, array.shape))}
        elif array is not None:
            body = npy(array)
        if op is not None:
            query["op"] = op.name.lower() if isinstance(op, ReduceOp) else op
        if isinstance(op, PremulSum):
            query |= {"op": "premul_sum", "factor": str(op.factor).strip("()")}
        query |= {"timeout": options.get("timeout")}
        query = {name: value for name, value in query.items() if value is not None}
        path = f"/v1/groups/world/{name}"
        request = self._client.post(path, params=query, content=body, headers=headers)
        answer = asyncio.run_coroutine_threadsafe(request, self._loop).result(60)
        if answer.status_code not in (200, 204):
            raise HttpProblemError(answer)
        if answer.status_code == 204:
            return None
        return from_raw(answer) if self._form == RAW else from_npy(answer.content)

    def _fill(self, tensors: Sequence[Array], found: Array | None) -> None:
        if found is not None:
            for tensor, array in zip(tensors, found.reshape(len(tensors), -1), strict=True):
                tensor[:] = array


@contextlib.contextmanager
def over_http(world: World, form: str = RAW) -> Iterator[list[OverHttp]]:
    """What makes each rank's calls over HTTP, by rank."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    opened = clients(applications(world))
    try:
        made = asyncio.run_coroutine_threadsafe(opened.__aenter__(), loop).result(20)
        yield [OverHttp(rank, world.size, client, loop, form) for rank, client in enumerate(made)]
        asyncio.run_coroutine_threadsafe(opened.__aexit__(None, None, None), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _root(options: dict[str, Any]) -> int | None:
    """Return the root, however it is named."""
    return next((value for name, value in options.items() if name.endswith(("src", "dst"))), None)
