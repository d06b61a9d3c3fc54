"""What is measured: every operation with its arrays, its call, and how to know that its result is right.

An operation is made for a number of bytes: of the array where there is one, of the larger one where there are two (the
output of an all_gather, the input of a reduce_scatter), so that equal sizes move about equally much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import ml_dtypes  # noqa: F401 - tells NumPy the name bfloat16
import numpy as np

from benchmarks.patterns import Numbered
from benchmarks.worlds import ROOT, Array, Call, World, blocks

IN_FLIGHT = 64
"""Operations of the asynchronous cases that are begun before the first is waited for."""
WINDOW_BYTES = 64 << 20
"""Messages of a bandwidth test are together not larger than this, so that eight ranks fit any machine."""


class Prepared(NamedTuple):
    """An operation ready to run on a rank.

    Attributes:
        call: does it.
        inputs: what to write, and where, so that the result can be told from others.
        outputs: what must then be where.
        units: how many operations the call is.
    """

    call: Call
    inputs: Sequence[Numbered] = ()
    outputs: Sequence[Numbered] = ()
    units: int = 1


@dataclass(frozen=True)
class Operation:
    """A line of the benchmark.

    Attributes:
        name: on the command line and in files.
        prepare: makes it ready in a world, for so many elements of a dtype.
        bus: bytes on the busiest link per byte of the array, by ranks, as nccl-tests has it; None: no bandwidth.
        dtype: of the arrays.
        sized: whether there are arrays at all.
        without: libraries that cannot do it, or for which it would say nothing.
        ranks: in worlds of how many ranks it is measured; empty: all.
    """

    name: str
    prepare: Callable[[World, int, np.dtype], Prepared]
    bus: Callable[[int], float] | None = None
    dtype: str = "float32"
    sized: bool = True
    without: frozenset[str] = field(default=frozenset())
    ranks: frozenset[int] = field(default=frozenset())

    def for_bytes(self, world: World, nbytes: int) -> Prepared:
        """Make it ready for arrays of about so many bytes: at least one element, or one a rank where it is cut."""
        dtype = np.dtype(self.dtype)
        return self.prepare(world, max(1, nbytes // dtype.itemsize), dtype)


def all_reduce(world: World, count: int, dtype: np.dtype) -> Prepared:
    array = world.empty(count, dtype)
    return Prepared(world.all_reduce(array), [(array, world.rank + 1)], [(array, total(world))])


def broadcast(world: World, count: int, dtype: np.dtype) -> Prepared:
    array = world.empty(count, dtype)
    return Prepared(world.broadcast(array), [(array, 3 if world.rank == ROOT else 0)], [(array, 3)])


def reduce(world: World, count: int, dtype: np.dtype) -> Prepared:
    array = world.empty(count, dtype)
    outputs = [(array, total(world))] if world.rank == ROOT else []
    return Prepared(world.reduce(array), [(array, world.rank + 1)], outputs)


def all_gather(world: World, count: int, dtype: np.dtype) -> Prepared:
    whole, share = pair(world, count, dtype)
    return Prepared(world.all_gather(whole, share), [(share, world.rank + 1)], by_rank(whole, world))


def gather(world: World, count: int, dtype: np.dtype) -> Prepared:
    whole, share = pair(world, count, dtype)
    outputs = by_rank(whole, world) if world.rank == ROOT else []
    return Prepared(world.gather(whole, share), [(share, world.rank + 1)], outputs)


def scatter(world: World, count: int, dtype: np.dtype) -> Prepared:
    whole, share = pair(world, count, dtype)
    inputs = by_rank(whole, world) if world.rank == ROOT else []
    return Prepared(world.scatter(share, whole), inputs, [(share, world.rank + 1)])


def reduce_scatter(world: World, count: int, dtype: np.dtype) -> Prepared:
    whole, share = pair(world, count, dtype)
    inputs = [(block, (world.rank + 1) * (to + 1)) for to, block in enumerate(blocks(whole, world.size))]
    return Prepared(world.reduce_scatter(share, whole), inputs, [(share, total(world) * (world.rank + 1))])


def all_to_all(world: World, count: int, dtype: np.dtype) -> Prepared:
    output, _ = pair(world, count, dtype)
    input, _ = pair(world, count, dtype)
    inputs = [(block, 1 + world.rank * world.size + to) for to, block in enumerate(blocks(input, world.size))]
    outputs = [(block, 1 + by * world.size + world.rank) for by, block in enumerate(blocks(output, world.size))]
    return Prepared(world.all_to_all(output, input), inputs, outputs)


def barrier(world: World, count: int, dtype: np.dtype) -> Prepared:
    return Prepared(world.barrier())


def ping_pong(world: World, count: int, dtype: np.dtype) -> Prepared:
    """There and back between ranks 0 and 1: two messages, as osu_latency has it."""
    ours, theirs = world.empty(count, dtype), world.empty(count, dtype)
    if world.rank > 1:
        return Prepared(lambda: None, units=2)
    other = 1 - world.rank
    send, recv = world.send(ours, other), world.recv(theirs, other)
    first, then = (send, recv) if world.rank == 0 else (recv, send)

    def call() -> None:
        first()
        then()

    return Prepared(call, [(ours, world.rank + 1)], [(theirs, other + 1)], units=2)


def message_stream(world: World, count: int, dtype: np.dtype) -> Prepared:
    """Many messages from rank 0 to rank 1 at once, then an answer, as osu_bw has it."""
    array, answer = world.empty(count, dtype), world.empty(1, dtype)
    messages = max(1, min(IN_FLIGHT, WINDOW_BYTES // array.nbytes))
    if world.rank > 1:
        return Prepared(lambda: None, units=messages)
    if world.rank == 0:
        begin, end = world.start_send(array, 1), world.recv(answer, 1)
    else:
        begin, end = world.start_recv(array, 0), world.send(answer, 0)

    def call() -> None:
        for started in [begin() for _ in range(messages)]:
            wait(started)
        end()

    mine, other = [(array, 5)], [(answer, 7)]
    return Prepared(call, *((mine, other) if world.rank == 0 else (other, mine)), units=messages)


def all_reduce_in_flight(world: World, count: int, dtype: np.dtype) -> Prepared:
    """Begin many, then wait for them."""
    arrays = [world.empty(count, dtype) for _ in range(IN_FLIGHT)]
    starts = [world.start_all_reduce(array) for array in arrays]

    def call() -> None:
        for started in [start() for start in starts]:
            wait(started)

    inputs = [(array, world.rank + 1) for array in arrays]
    return Prepared(call, inputs, [(array, total(world)) for array in arrays])


def overlap_all_reduce(world: World, count: int, dtype: np.dtype) -> Prepared:
    """Begin one and wait for it: what can be hidden behind something else."""
    return _while(world, count, dtype, lambda: None)


def overlap_computing(world: World, count: int, dtype: np.dtype) -> Prepared:
    return Prepared(computation())


def overlap_sleeping(world: World, count: int, dtype: np.dtype) -> Prepared:
    return Prepared(sleep)


def overlap_while_computing(world: World, count: int, dtype: np.dtype) -> Prepared:
    return _while(world, count, dtype, computation())


def overlap_while_sleeping(world: World, count: int, dtype: np.dtype) -> Prepared:
    return _while(world, count, dtype, sleep)


def _while(world: World, count: int, dtype: np.dtype, work: Call) -> Prepared:
    array = world.empty(count, dtype)
    start = world.start_all_reduce(array)

    def call() -> None:
        started = start()
        work()
        wait(started)

    return Prepared(call, [(array, world.rank + 1)], [(array, total(world))])


def computation() -> Call:
    """Return some milliseconds of work for one core, in which the interpreter lets other threads run."""
    factor = np.random.default_rng(1).random((768, 768), np.float32)
    return partial(np.matmul, factor, factor, out=np.empty_like(factor))


def sleep() -> None:
    """Wait as for a GPU or a disk."""
    time.sleep(0.02)


def wait(started: object) -> None:
    """Wait for a Work of RankMesh or torch, or for a Request of MPI."""
    (started.wait if hasattr(started, "wait") else started.Wait)()


def total(world: World) -> int:
    """Return the sum of all ranks' numbers, counted from one."""
    return world.size * (world.size + 1) // 2


def pair(world: World, count: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Return the array that has something of every rank, and a rank's share. All ranks have both."""
    share = max(1, count // world.size)
    return world.empty(share * world.size, dtype), world.empty(share, dtype)


def by_rank(whole: Array, world: World) -> list[Numbered]:
    """Return an array's blocks, each with its rank's number."""
    return [(block, rank + 1) for rank, block in enumerate(blocks(whole, world.size))]


def _whole(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice_others(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


_NOT_MPI = frozenset({"mpi"})
_NOT_REGISTERED = frozenset({"registered"})
_PAIR = frozenset({2})

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", all_reduce, _twice_others),
        Operation("broadcast", broadcast, _whole),
        Operation("all_gather", all_gather, _others),
        Operation("reduce_scatter", reduce_scatter, _others),
        Operation("all_to_all", all_to_all, _others),
        Operation("reduce", reduce, _whole),
        Operation("gather", gather, _others),
        Operation("scatter", scatter, _others),
        Operation("send_recv", ping_pong, _whole, without=_NOT_REGISTERED, ranks=_PAIR),
        Operation("bandwidth", message_stream, _whole, without=_NOT_REGISTERED, ranks=_PAIR),
        Operation("barrier", barrier, sized=False, without=_NOT_REGISTERED),
        Operation("all_reduce_float16", all_reduce, _twice_others, "float16", without=_NOT_MPI),
        Operation("all_reduce_bfloat16", all_reduce, _twice_others, "bfloat16", without=_NOT_MPI),
        Operation("all_reduce_in_flight", all_reduce_in_flight, without=_NOT_REGISTERED),
        Operation("overlap_all_reduce", overlap_all_reduce, without=_NOT_REGISTERED),
        Operation("overlap_computing", overlap_computing, sized=False, without=_NOT_REGISTERED),
        Operation("overlap_sleeping", overlap_sleeping, sized=False, without=_NOT_REGISTERED),
        Operation("overlap_while_computing", overlap_while_computing, without=_NOT_REGISTERED),
        Operation("overlap_while_sleeping", overlap_while_sleeping, without=_NOT_REGISTERED),
    )
}
