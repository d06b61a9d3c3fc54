"""The operations measured: arrays, call, and the contents by which a result is known to be right.

Sizes are of the array, or of the larger one of two: the output of an all_gather, the input of a reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - tells NumPy the name bfloat16
import numpy as np

from benchmarks.adapters import ROOT, Adapter, Array, Call, blocks
from benchmarks.patterns import Numbered

IN_FLIGHT = 64
"""Operations of the asynchronous cases that are begun before the first is waited for."""
KEYS, VALUE = [f"key/{number}" for number in range(100)], b"v" * 64


class Prepared(NamedTuple):
    """An operation ready to run: arrays with their multiples of the pattern, and the number of operations in a call."""

    call: Call
    inputs: Sequence[Numbered] = ()
    outputs: Sequence[Numbered] = ()
    units: int = 1
    together: bool = True  # a rank that serves a store must not wait in a barrier beside its server


class Arguments(NamedTuple):
    """The rank, and the length and dtype of the arrays."""

    world: Adapter
    length: int
    dtype: np.dtype

    def call(self, name: str, *arguments: Any) -> Call:
        """Return the world's call of a name, made for the arguments."""
        return self.world.calls[name](*arguments)

    def array(self) -> Array:
        """Return an array."""
        array: Array = self.world.empty(self.length, self.dtype)
        return array

    def pair(self) -> tuple[Array, Array]:
        """Return an array that has a block of every rank, and one of a block's size."""
        share = max(1, self.length // self.world.size)
        return self.world.empty(share * self.world.size, self.dtype), self.world.empty(share, self.dtype)


class Operation(NamedTuple):
    """A row of the benchmark: of all libraries but those in ``without``, for ``ranks`` ranks alone unless None."""

    prepare: Callable[[Arguments], Prepared]
    dtype: str = "float32"
    sized: bool = True
    without: frozenset[str] = frozenset()
    ranks: int | None = None

    def for_bytes(self, world: Adapter, nbytes: int) -> Prepared:
        """Make it ready for arrays of about ``nbytes``: at least one element, or one a rank where it is split."""
        dtype = np.dtype(self.dtype)
        return self.prepare(Arguments(world, max(1, nbytes // dtype.itemsize), dtype))


def all_reduce(of: Arguments) -> Prepared:
    array = of.array()
    return Prepared(of.call("all_reduce", array), [(array, of.world.rank + 1)], [(array, total(of.world))])


def broadcast(of: Arguments) -> Prepared:
    array = of.array()
    return Prepared(of.call("broadcast", array), [(array, 3 if of.world.rank == ROOT else 0)], [(array, 3)])


def reduce(of: Arguments) -> Prepared:
    array = of.array()
    outputs = [(array, total(of.world))] if of.world.rank == ROOT else []
    return Prepared(of.call("reduce", array), [(array, of.world.rank + 1)], outputs)


def all_gather(of: Arguments) -> Prepared:
    whole, share = of.pair()
    return Prepared(of.call("all_gather", whole, share), [(share, of.world.rank + 1)], by_rank(whole, of.world))


def gather(of: Arguments) -> Prepared:
    whole, share = of.pair()
    outputs = by_rank(whole, of.world) if of.world.rank == ROOT else []
    return Prepared(of.call("gather", whole, share), [(share, of.world.rank + 1)], outputs)


def scatter(of: Arguments) -> Prepared:
    whole, share = of.pair()
    inputs = by_rank(whole, of.world) if of.world.rank == ROOT else []
    return Prepared(of.call("scatter", share, whole), inputs, [(share, of.world.rank + 1)])


def reduce_scatter(of: Arguments) -> Prepared:
    whole, share = of.pair()
    mine = of.world.rank + 1
    inputs = [(block, mine * (to + 1)) for to, block in enumerate(blocks(whole, of.world.size))]
    return Prepared(of.call("reduce_scatter", share, whole), inputs, [(share, total(of.world) * mine)])


def all_to_all(of: Arguments) -> Prepared:
    (output, _), (input, _), (rank, size) = of.pair(), of.pair(), (of.world.rank, of.world.size)
    inputs = [(block, 1 + rank * size + to) for to, block in enumerate(blocks(input, size))]
    outputs = [(block, 1 + by * size + rank) for by, block in enumerate(blocks(output, size))]
    return Prepared(of.call("all_to_all", output, input), inputs, outputs)


def barrier(of: Arguments) -> Prepared:
    return Prepared(of.call("barrier"))


def ping_pong(of: Arguments) -> Prepared:
    """A message from rank 0 to rank 1 and one back, as in osu_latency."""
    ours, theirs, other = of.array(), of.array(), 1 - of.world.rank
    send, recv = of.call("send", ours, other), of.call("recv", theirs, other)
    first, then = (recv, send) if of.world.rank else (send, recv)

    def call() -> None:
        first()
        then()

    return Prepared(call, [(ours, of.world.rank + 1)], [(theirs, other + 1)], units=2)


def all_reduce_in_flight(of: Arguments) -> Prepared:
    """Begin many, then wait for them."""
    arrays = [of.array() for _ in range(IN_FLIGHT)]
    starts = [of.call("start_all_reduce", array) for array in arrays]

    def call() -> None:
        for started in [start() for start in starts]:
            wait(started)

    inputs = [(array, of.world.rank + 1) for array in arrays]
    return Prepared(call, inputs, [(array, total(of.world)) for array in arrays])


def wait(started: Any) -> None:
    """Wait for a Work of RankMesh or torch, or for a Request of MPI."""
    (started.wait if hasattr(started, "wait") else started.Wait)()


def total(world: Adapter) -> int:
    """Return the sum of all ranks' numbers, counted from one."""
    return world.size * (world.size + 1) // 2


def by_rank(whole: Array, world: Adapter) -> list[Numbered]:
    """Return an array's blocks, each with its rank's number."""
    return [(block, rank + 1) for rank, block in enumerate(blocks(whole, world.size))]


def by_client(operation: Callable[[Any], object]) -> Operation:
    """Return an operation of rank 1 on a TCPStore that rank 0 serves."""

    def prepare(of: Arguments) -> Prepared:
        store = connected(of.world)
        return Prepared((lambda: operation(store)) if of.world.rank == 1 else (lambda: None), together=False)

    without = frozenset({"mpi", "registered", "attached", "rankmesh-mpi"})
    return Operation(prepare, sized=False, without=without, ranks=2)


@cache
def connected(world: Adapter) -> Any:
    """Return the world's TCPStore with the keys in it; raise ArithmeticError if it loses what it is given."""
    store = world.calls["store"]()()
    for key in KEYS:
        store.set(key, VALUE)
    if store.add(f"check/{world.rank}", 2) + store.add(f"check/{world.rank}", 3) != 7 or store.get(KEYS[-1]) != VALUE:
        raise ArithmeticError(f"rank {world.rank}: the store does not keep what it is given")
    return store


_NOT_MPI, _NOT_REGISTERED = frozenset({"mpi"}), frozenset({"registered"})

OPERATIONS = {
    "all_reduce": Operation(all_reduce),
    "broadcast": Operation(broadcast),
    "all_gather": Operation(all_gather),
    "reduce_scatter": Operation(reduce_scatter),
    "all_to_all": Operation(all_to_all),
    "reduce": Operation(reduce),
    "gather": Operation(gather),
    "scatter": Operation(scatter),
    "send_recv": Operation(ping_pong, without=_NOT_REGISTERED, ranks=2),
    "barrier": Operation(barrier, sized=False, without=_NOT_REGISTERED),
    "all_reduce_float16": Operation(all_reduce, "float16", without=_NOT_MPI),
    "all_reduce_bfloat16": Operation(all_reduce, "bfloat16", without=_NOT_MPI),
    "all_reduce_in_flight": Operation(all_reduce_in_flight, without=_NOT_REGISTERED),
    "store_set": by_client(lambda store: store.set("key", VALUE)),
    "store_get": by_client(lambda store: store.get(KEYS[0])),
    "store_add": by_client(lambda store: store.add("count", 1)),
    "store_multi_get": by_client(lambda store: store.multi_get(KEYS)),
}
