"""Media of the sweep beside ``rankmesh`` itself: the functions of its API, for one rank, over something else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import PremulSum, ReduceOp
from support.http_ranks import from_raw
from support.sweep.containers import Array
from support.threads import LATER, NOW

ANY = -1
POOL_BYTES = 1 << 22
"""Registered bytes of each rank."""
RAW = "application/octet-stream"


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

        def call(*arrays: Any, group: None, async_op: bool, op: Any = None, **root: int) -> Any:
            if name in ("gather", "scatter"):
                arrays = arrays[::-1] if name == "gather" else arrays
                arrays = tuple([] if each is None else each for each in arrays)
            if name == "reduce_scatter_single":
                arrays = (arrays[0], list(arrays[1]))
            return method(*arrays, *([] if op is None else [op]), *root.values(), LATER if async_op else NOW)

        return call

    def isend(self, tensor: Array, dst: int, group: None, tag: int) -> Any:
        return self._comm.send(tensor, dst, tag, LATER)

    def irecv(self, tensor: Array, src: int | None, group: None, tag: int) -> Any:
        return self._comm.receive(tensor, ANY if src is None else src, tag, LATER)

    def send(self, tensor: Array, group: None, tag: int, group_dst: int) -> None:
        self._comm.send(tensor, group_dst, tag, NOW)

    def recv(self, tensor: Array, src: int | None, group: None, tag: int) -> Any:
        return self._comm.receive(tensor, ANY if src is None else src, tag, NOW)


class OverHttp:
    """The HTTP endpoints of a rank's agent: collectives, in raw elements.

    Args:
        rank: the rank.
        size: how many there are.
        client: of its agent.
        loop: runs the client; calls are made in other threads.
    """

    def __init__(self, rank: int, size: int, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._rank, self._size, self._client, self._loop = rank, size, client, loop

    def get_rank(self, group: None) -> int:
        return self._rank

    def get_world_size(self, group: None) -> int:
        return self._size

    def get_process_group_ranks(self, group: None) -> list[int]:
        return list(range(self._size))

    def all_reduce(self, tensor: Array, op: Any, **_: Any) -> None:
        self._fill([tensor], self._make("all_reduce", tensor, op=op))

    def reduce(self, tensor: Array, op: Any, group: None, async_op: bool, **root: int) -> None:
        self._fill([tensor], self._make("reduce", tensor, op=op, dst=_only(root)))

    def broadcast(self, tensor: Array, group: None, async_op: bool, **root: int) -> None:
        self._fill([tensor], self._make("broadcast", tensor, src=_only(root)))

    def all_gather(self, tensors: Sequence[Array], tensor: Array, **_: Any) -> None:
        self._fill(tensors, self._make("all_gather", tensor))

    def gather(self, tensor: Array, tensors: Sequence[Array] | None, group: None, async_op: bool, **root: int) -> None:
        self._fill(tensors or [], self._make("gather", tensor, dst=_only(root)))

    def scatter(self, tensor: Array, tensors: Sequence[Array], group: None, async_op: bool, **root: int) -> None:
        self._fill([tensor], self._make("scatter", np.stack(tensors) if tensors else tensor, src=_only(root)))

    def reduce_scatter(self, tensor: Array, tensors: Sequence[Array], op: Any, **_: Any) -> None:
        self._fill([tensor], self._make("reduce_scatter", np.stack(tensors), op=op))

    def all_to_all(self, outputs: Sequence[Array], inputs: Sequence[Array], **_: Any) -> None:
        self._fill(outputs, self._make("all_to_all", np.stack(inputs)))

    def _make(self, name: str, array: Array, op: ReduceOp | PremulSum | None = None, **query: Any) -> Array | None:
        query |= {"dtype": display(array.dtype), "shape": ",".join(map(str, array.shape))}
        if op is not None:
            query["op"] = "premul_sum" if isinstance(op, PremulSum) else op.name.lower()
        if isinstance(op, PremulSum):
            query["factor"] = str(op.factor).strip("()")
        answer = asyncio.run_coroutine_threadsafe(
            self._client.post(
                f"/v1/groups/world/{name}",
                params=query,
                content=array.tobytes(),
                headers={"Content-Type": RAW, "Accept": RAW},
            ),
            self._loop,
        ).result(60)
        assert answer.status_code in (200, 204), answer.text
        return from_raw(answer) if answer.status_code == 200 else None

    def _fill(self, tensors: Sequence[Array], found: Array | None) -> None:
        if found is not None:
            for tensor, array in zip(tensors, found.reshape(len(tensors), -1), strict=True):
                tensor[:] = array


def _only(root: dict[str, int]) -> int:
    """Return the root, however it was named."""
    (rank,) = root.values()
    return rank
