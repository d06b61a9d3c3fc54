"""Calls that are refused: by the rank that makes them, or by all because they do not fit together. For three ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import rankmesh as dist
from support.me import Me

SIZE = 3
LARGE = 40_000
"""Elements of float32 that are above the limits for small arrays."""
SUM, MAX, AVG, PREMUL_SUM = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM

Array = np.ndarray[Any, Any]


class Caller:
    """A rank that makes a call: calling it gives an array of its own numbers, which the call must leave alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._made: list[tuple[Array, Array]] = []

    def __call__(self, count: int = 3, dtype: Any = np.float32) -> Array:
        array = (np.arange(count) + 10 * self.rank).astype(dtype)
        self._made.append((array, array.copy()))
        return array

    def many(self, number: int = SIZE, count: int = 3, dtype: Any = np.float32) -> list[Array]:
        """Return several arrays."""
        return [self(count, dtype) for _ in range(number)]

    def read_only(self, count: int = 3) -> Array:
        """Return an array that cannot be written to."""
        array = self(count)
        array.flags.writeable = False
        return array

    @property
    def other(self) -> int:
        """Another rank."""
        return (self.rank + 1) % SIZE

    def unchanged(self) -> bool:
        """Whether all arrays are as they were."""
        return all((array == before).all() for array, before in self._made)


class Wrong(NamedTuple):
    """A call that the rank that makes it refuses.

    Attributes:
        call: makes it.
        error: what it raises.
        says: what its message must say, a pattern.
    """

    call: Callable[[Caller], Any]
    error: type[Exception]
    says: str


def _refused(error: type[Exception], says: str, **calls: Callable[[Caller], Any]) -> dict[str, Wrong]:
    return {name: Wrong(call, error, says) for name, call in calls.items()}


NOT_THERE = r"=3 is not in the group, whose ranks are \[0, 1, 2\]"
NO_GROUP_RANK = r"group_(src|dst)=3 is not in the group, whose ranks are 0 to 2"
THREE_ELEMENTS = r"2 elements, but .* has 3"

WRONG: dict[str, Wrong] = {
    **_refused(
        ValueError, NOT_THERE,
        gather_to_nobody=lambda a: dist.gather(a(), a.many(), dst=3),
        send_to_nobody=lambda a: dist.send(a(), dst=3),
        broadcast_multigpu_from_nobody=lambda a: dist.broadcast_multigpu(a.many(), src=3),
        reduce_multigpu_to_nobody=lambda a: dist.reduce_multigpu(a.many(), dst=3),
    ),
    **_refused(
        ValueError, NO_GROUP_RANK,
        scatter_from_no_group_rank=lambda a: dist.scatter(a(), a.many(), group_src=3),
        send_to_no_group_rank=lambda a: dist.send(a(), group_dst=3),
    ),
    **_refused(
        ValueError, "not both",
        send_to_two=lambda a: dist.send(a(), dst=0, group_dst=0),
    ),
    **_refused(
        ValueError, r"(src|dst) is missing",
        reduce_to_somewhere=lambda a: dist.reduce(a()),
    ),
    **_refused(
        TypeError, "must be a whole number",
        broadcast_from_half_a_rank=lambda a: dist.broadcast(a(), src=0.5),  # type: ignore[arg-type]
        reduce_to_a_name=lambda a: dist.reduce(a(), dst="0"),  # type: ignore[arg-type]
        split_sizes_that_are_no_numbers=lambda a: dist.all_to_all_single(a(), a(), [1.0] * 3),  # type: ignore[list-item]
    ),
    **_refused(
        ValueError, "is this rank",
        messages_to_oneself=lambda a: dist.batch_isend_irecv([dist.P2POp(dist.isend, a(), a.rank)]),
    ),
    **_refused(
        ValueError, "has [24] arrays, but the group has 3 ranks",
        all_gather_into_too_few=lambda a: dist.all_gather(a.many(2), a()),
        all_gather_into_too_many=lambda a: dist.all_gather(a.many(4), a()),
        gather_into_too_few=lambda a: dist.gather(a(), a.many(2), dst=a.rank),
        scatter_of_too_many=lambda a: dist.scatter(a(), a.many(4), src=a.rank),
        reduce_scatter_of_too_few=lambda a: dist.reduce_scatter(a(), a.many(2)),
        all_to_all_of_too_few=lambda a: dist.all_to_all(a.many(), a.many(2)),
        all_to_all_into_too_many=lambda a: dist.all_to_all(a.many(4), a.many()),
    ),
    **_refused(
        TypeError, "must be a list of 3 arrays",
        all_gather_into_an_array=lambda a: dist.all_gather(a(), a()),  # type: ignore[arg-type]
        all_gather_into_nothing=lambda a: dist.all_gather(None, a()),  # type: ignore[arg-type]
        reduce_scatter_of_an_array=lambda a: dist.reduce_scatter(a(), a()),  # type: ignore[arg-type]
        all_to_all_of_an_array=lambda a: dist.all_to_all(a.many(), a()),  # type: ignore[arg-type]
    ),
    **_refused(
        ValueError, "is missing: on the (destination|source) rank give a list of one array a rank",
        gather_into_nothing=lambda a: dist.gather(a(), None, dst=a.rank),
        scatter_of_nothing=lambda a: dist.scatter(a(), None, src=a.rank),
    ),
    **_refused(
        ValueError, "is only for the (destination|source) rank: leave it out on this one",
        gather_with_a_list_elsewhere=lambda a: dist.gather(a(), a.many(), dst=a.other),
        scatter_with_a_list_elsewhere=lambda a: dist.scatter(a(), a.many(), src=a.other),
    ),
    **_refused(
        ValueError, THREE_ELEMENTS,
        all_gather_into_smaller_ones=lambda a: dist.all_gather(a.many(count=2), a()),
        gather_into_smaller_ones=lambda a: dist.gather(a(), a.many(count=2), dst=a.rank),
        scatter_of_smaller_ones=lambda a: dist.scatter(a(), a.many(count=2), src=a.rank),
        reduce_scatter_of_smaller_ones=lambda a: dist.reduce_scatter(a(), a.many(count=2)),
    ),
    **_refused(
        ValueError, r"has 8 elements, but must have 3 times the 3 of \w+, 9",
        all_gather_into_a_smaller_one=lambda a: dist.all_gather_into_tensor(a(8), a(3)),
        reduce_scatter_of_a_smaller_one=lambda a: dist.reduce_scatter_tensor(a(3), a(8)),
    ),
    **_refused(
        ValueError, r"has dtype float64 at 1, but \w+(\[0\])? has float32: all must have the same",
        all_gather_of_another_dtype=lambda a: dist.all_gather(a.many(dtype=float), a()),
        all_gather_single_of_another_dtype=lambda a: dist.all_gather_into_tensor(a(9, float), a()),
        gather_of_another_dtype=lambda a: dist.gather(a(), a.many(dtype=float), dst=a.rank),
        scatter_of_another_dtype=lambda a: dist.scatter(a(), a.many(dtype=float), src=a.rank),
        reduce_scatter_of_another_dtype=lambda a: dist.reduce_scatter(a(), a.many(dtype=float)),
        reduce_scatter_single_of_another_dtype=lambda a: dist.reduce_scatter_tensor(a(), a(9, float)),
        all_to_all_of_another_dtype=lambda a: dist.all_to_all(a.many(dtype=float), a.many()),
        all_to_all_of_several_dtypes=lambda a: dist.all_to_all(a.many(), [a(), a(dtype=float), a()]),
        all_to_all_single_of_another_dtype=lambda a: dist.all_to_all_single(a(dtype=float), a()),
    ),
    **_refused(
        ValueError, "is read-only, and the operation writes to it; pass a writable copy",
        all_reduce_of_a_read_only_array=lambda a: dist.all_reduce(a.read_only()),
        reduce_into_a_read_only_array=lambda a: dist.reduce(a.read_only(), dst=a.rank),
        broadcast_into_a_read_only_array=lambda a: dist.broadcast(a.read_only(), src=a.other),
        all_gather_into_a_read_only_array=lambda a: dist.all_gather([a(), a(), a.read_only()], a()),
        all_gather_single_into_a_read_only_array=lambda a: dist.all_gather_into_tensor(a.read_only(9), a()),
        gather_into_a_read_only_array=lambda a: dist.gather(a(), [a.read_only(), a(), a()], dst=a.rank),
        scatter_into_a_read_only_array=lambda a: dist.scatter(a.read_only(), src=a.other),
        reduce_scatter_into_a_read_only_array=lambda a: dist.reduce_scatter(a.read_only(), a.many()),
        reduce_scatter_tensor_into_a_read_only_array=lambda a: dist.reduce_scatter_tensor(a.read_only(), a(9)),
        all_to_all_into_a_read_only_array=lambda a: dist.all_to_all([a(), a.read_only(), a()], a.many()),
        all_to_all_single_into_a_read_only_array=lambda a: dist.all_to_all_single(a.read_only(), a()),
        recv_into_a_read_only_array=lambda a: dist.recv(a.read_only(), src=a.other),
        all_reduce_of_bytes=lambda a: dist.all_reduce(b"abc"),
    ),
    **_refused(
        ValueError, "has elements that share memory",
        all_reduce_of_an_expanded_array=lambda a: dist.all_reduce(
            np.lib.stride_tricks.as_strided(a(1), (3,), (0,), writeable=True)
        ),
    ),
    **_refused(
        TypeError, r"ReduceOp.\w+ is not defined for \w+",
        all_reduce_max_of_complex=lambda a: dist.all_reduce(a(dtype=complex), MAX),
        reduce_bits_of_floats=lambda a: dist.reduce(a(), 0, dist.ReduceOp.BXOR),
        reduce_scatter_min_of_complex=lambda a: dist.reduce_scatter(
            a(dtype=complex), a.many(dtype=complex), dist.ReduceOp.MIN
        ),
        reduce_scatter_tensor_bits_of_floats=lambda a: dist.reduce_scatter_tensor(a(), a(9), dist.ReduceOp.BAND),
        all_reduce_average_of_bool=lambda a: dist.all_reduce(a(dtype=bool), AVG),
        all_reduce_premultiplied_bool=lambda a: dist.all_reduce(a(dtype=bool), PREMUL_SUM(1)),
        all_reduce_coalesced_bits_of_floats=lambda a: dist.all_reduce_coalesced(a.many(), dist.ReduceOp.BOR),
        all_reduce_multigpu_bits_of_floats=lambda a: dist.all_reduce_multigpu(a.many(), dist.ReduceOp.BOR),
    ),
    **_refused(
        TypeError, "PREMUL_SUM",
        premul_sum_without_a_factor=lambda a: dist.all_reduce(a(), PREMUL_SUM),
        premul_sum_of_integers_by_too_much=lambda a: dist.all_reduce(a(dtype=np.int8), PREMUL_SUM(200)),
    ),
    **_refused(
        TypeError, "op must be a rankmesh.ReduceOp",
        all_reduce_by_name=lambda a: dist.all_reduce(a(), "SUM"),  # type: ignore[arg-type]
        reduce_by_number=lambda a: dist.reduce(a(), 0, 0),  # type: ignore[arg-type]
    ),
    **_refused(
        ValueError, r"(in|out)put_split_sizes=\[.*\] must be 3 numbers, one a rank, that add up to the 3 rows",
        all_to_all_single_of_too_few_rows=lambda a: dist.all_to_all_single(a(), a(), None, [1, 1, 0]),
        all_to_all_single_of_too_many_rows=lambda a: dist.all_to_all_single(a(), a(), None, [1, 1, 2]),
        all_to_all_single_into_too_few_rows=lambda a: dist.all_to_all_single(a(), a(), [1, 0, 1], [1, 1, 1]),
        all_to_all_single_with_too_few_splits=lambda a: dist.all_to_all_single(a(), a(), None, [2, 1]),
        all_to_all_single_with_negative_splits=lambda a: dist.all_to_all_single(a(), a(), None, [5, -1, -1]),
    ),
    **_refused(
        ValueError, "rows, which do not divide evenly by the group's 3 ranks: give (in|out)put_split_sizes",
        all_to_all_single_of_uneven_rows=lambda a: dist.all_to_all_single(a(3), a(4)),
        all_to_all_single_into_uneven_rows=lambda a: dist.all_to_all_single(a(4), a(3)),
    ),
    **_refused(
        TypeError, r"cannot be communicated|must be a NumPy array",
        all_reduce_of_text=lambda a: dist.all_reduce(np.array(["a"])),
        all_reduce_of_objects=lambda a: dist.all_reduce(np.array([None])),
        all_reduce_of_a_list=lambda a: dist.all_reduce([1.0]),
        all_reduce_of_nothing=lambda a: dist.all_reduce(None),
        all_gather_of_dates=lambda a: dist.all_gather(a.many(), np.array(["2020-01-01"], "M8[D]")),
        all_gather_into_numbers=lambda a: dist.all_gather([1.0, 2.0, 3.0], a()),
    ),
    **_refused(
        ValueError, "timeout",
        all_reduce_in_less_than_no_time=lambda a: dist.all_reduce(a(), timeout=-1),
    ),
    **_refused(
        ValueError, "all arrays must have the same dtype and number of elements",
        all_reduce_multigpu_of_several_dtypes=lambda a: dist.all_reduce_multigpu([a(), a(dtype=float)]),
        broadcast_multigpu_of_several_sizes=lambda a: dist.broadcast_multigpu([a(), a(4)], src=0),
    ),
    **_refused(
        ValueError, "p2p_op_list is empty",
        no_messages=lambda a: dist.batch_isend_irecv([]),
    ),
    **_refused(
        ValueError, "read-only",
        batch_with_a_wrong_call=lambda a: _batch(a(), a.read_only()),
    ),
}  # fmt: skip


def _batch(*arrays: Array) -> None:
    with dist.batch():
        for array in arrays:
            dist.all_reduce(array)


MISMATCHED: dict[str, Callable[[Caller], Any]] = {
    "other_sizes": lambda a: dist.all_reduce(a(3 if a.rank else 4)),
    "other_sizes_of_large_arrays": lambda a: dist.all_reduce(a(LARGE + a.rank)),
    "a_large_array_and_a_small_one": lambda a: dist.all_reduce(a(LARGE if a.rank == 1 else 1)),
    "an_empty_array": lambda a: dist.all_reduce(a(0 if a.rank == 2 else LARGE)),
    "other_dtypes_of_as_many_bytes": lambda a: dist.all_reduce(a(dtype=np.float32 if a.rank else np.int32)),
    "other_operations": lambda a: dist.all_reduce(a(), MAX if a.rank == 1 else SUM),
    "a_factor_and_none": lambda a: dist.all_reduce(a(), SUM if a.rank else PREMUL_SUM(2.0)),
    "other_functions": lambda a: dist.all_reduce(a()) if a.rank else dist.broadcast(a(), 0),
    "a_barrier_and_a_reduction": lambda a: dist.barrier() if a.rank else dist.all_reduce(a(LARGE)),
    "gather_and_all_gather": lambda a: dist.gather(a(), None, 0) if a.rank else dist.all_gather(a.many(), a()),
    "broadcast_from_other_ranks": lambda a: dist.broadcast(a(), src=a.rank),
    "reduce_to_other_ranks": lambda a: dist.reduce(a(LARGE), dst=a.rank % 2),
    "scatter_from_other_ranks": lambda a: dist.scatter(a(), a.many() if a.rank < 2 else None, src=a.rank % 2),
    "broadcast_of_other_sizes": lambda a: dist.broadcast(a(3 + a.rank), src=0),
    "reduce_of_other_sizes": lambda a: dist.reduce(a(3 + a.rank), dst=0),
    "gather_of_other_sizes": lambda a: dist.gather(a(3 + a.rank), None if a.rank else a.many(), dst=0),
    "scatter_of_other_sizes": lambda a: dist.scatter(a(3 + a.rank), None if a.rank else a.many(), src=0),
    "all_gather_of_unexpected_sizes": lambda a: dist.all_gather(a.many(count=3 + a.rank), a(3 + a.rank)),
    "all_gather_of_sizes_in_another_order": lambda a: dist.all_gather(
        [a(3 + (rank + a.rank) % SIZE) for rank in range(SIZE)], a(3 + 2 * a.rank % SIZE)
    ),
    "all_gather_single_of_other_sizes": lambda a: dist.all_gather_into_tensor(a(3 * (3 + a.rank)), a(3 + a.rank)),
    "reduce_scatter_of_other_sizes": lambda a: dist.reduce_scatter(a(3 + a.rank), a.many(count=3 + a.rank)),
    "reduce_scatter_single_of_other_sizes": lambda a: dist.reduce_scatter_single(a(3 + a.rank), a(3 * (3 + a.rank))),
    "all_to_all_of_unexpected_sizes": lambda a: dist.all_to_all(a.many(count=2 if a.rank == 1 else 3), a.many()),
    "all_to_all_of_large_unexpected_sizes": lambda a: dist.all_to_all(
        a.many(count=LARGE), a.many(count=LARGE + (a.rank == 2))
    ),
    "all_to_all_of_other_dtypes": lambda a: dist.all_to_all(*[a.many(dtype=f"f{4 + 4 * (a.rank == 2)}")] * 2),
    "all_to_all_single_of_unexpected_sizes": lambda a: dist.all_to_all_single(a(), a(), [0, 1, 2], [1, 1, 1]),
    "all_reduce_multigpu_of_other_lengths": lambda a: dist.all_reduce_multigpu(a.many(1 + a.rank)),
    "batches_of_other_sizes": lambda a: _batch(a(2), a(3 + a.rank)),
    "batches_split_otherwise": lambda a: _batch(a(2 + a.rank), a(5 - a.rank)),
}
"""Calls that do not fit together, by name."""


def try_wrong(me: Me) -> None:
    """Make every wrong call on rank 1 alone, then on all ranks; tell what came of each.

    After each, all ranks sum up: had anything of it been sent, that would not fit together.
    """
    for name, wrong in WRONG.items():
        alone = attempt(me, wrong.call, makes_it=me.rank == 1)
        together = attempt(me, wrong.call)
        me.report(**{name: [alone, together] if me.rank == 1 else [together]})


def try_mismatched(me: Me) -> None:
    """Make the calls that do not fit together, by the caller's thread and by the worker's; tell what came of each."""
    for name, call in MISMATCHED.items():
        me.report(**{name: [attempt(me, call), attempt(me, lambda a, call=call: later(a, call))]})


def attempt(me: Me, call: Callable[[Caller], Any], *, makes_it: bool = True) -> dict[str, Any]:
    """Make a call that is refused; return how, and whether arrays and group are as they were."""
    caller = Caller(me.rank)
    found = me.attempt(call, caller) if makes_it else {}
    try:
        usable = sums()
    except dist.CollectiveMismatchError:  # the call was made after all, and the others' sum met it
        sums()
        usable = False
    return {**found, "unchanged": caller.unchanged(), "usable": usable}


def sums() -> bool:
    """Reduce over all ranks; return whether the result is right."""
    total = np.full(4, dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.tolist() == [6] * 4


def later(caller: Caller, call: Callable[[Caller], Any]) -> None:
    """Make a call behind one that is asynchronous, so that it is made by the worker thread."""
    work = dist.barrier(async_op=True)
    assert work is not None
    call(caller)
    work.wait()
