"""One table of wrong calls, for three ranks: invalid at the rank that makes them, or different from rank to rank.

A call is made on an *api*: ``rankmesh``, or its functions over another medium (support/sweep/media.py, over_torch.py).
CANNOT lists the calls that a medium has no form for. wrong_attempts.py makes the calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.wire.ops import ReduceOp

SIZE = 3
LARGE = 40_000
"""Elements of float32 that are above the limits for small arrays."""
SUM, AVG, MIN, MAX, BAND, BOR, PREMUL_SUM = (
    ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.PREMUL_SUM
)  # fmt: skip

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

    def expanded(self) -> Array:
        """Return an array whose elements share memory."""
        return np.lib.stride_tricks.as_strided(self(1), (3,), (0,), writeable=True)

    @property
    def other(self) -> int:
        """Another rank."""
        return (self.rank + 1) % SIZE

    def unchanged(self) -> bool:
        """Whether all arrays are as they were."""
        return all((array == before).all() for array, before in self._made)


Call = Callable[[Any, Caller], Any]


class Wrong(NamedTuple):
    """A call that is invalid at the rank that makes it.

    Attributes:
        call: makes it.
        error: the exception.
        says: a pattern of its message.
        http: response to the same call over HTTP: the status, the problem's code, and a pattern of its detail.
    """

    call: Call
    error: type[Exception]
    says: str
    http: tuple[int, str, str]


def _wrong(error: type[Exception], says: str, http: Any = "", *, request: Any = "", **calls: Call) -> dict[str, Wrong]:
    """Return rows of the table; ``http`` is another pattern of the detail, ``request`` that of a schema's violation."""
    problem = 422, "invalid-request" if request else "invalid-call", request or http or says
    return {name: Wrong(call, error, says, problem) for name, call in calls.items()}


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda api, a, **how: api.all_reduce(a(), **how),
    "reduce": lambda api, a, **how: api.reduce(a(), **{"dst": 0, **how}),
    "broadcast": lambda api, a, **how: api.broadcast(a(), **{"src": 0, **how}),
    "all_gather": lambda api, a, **how: api.all_gather(a.many(), a(), **how),
    "all_gather_into_tensor": lambda api, a, **how: api.all_gather_into_tensor(a(9), a(), **how),
    "gather": lambda api, a, **how: api.gather(a(), None, **{"dst": a.other, **how}),
    "scatter": lambda api, a, **how: api.scatter(a(), None, **{"src": a.other, **how}),
    "reduce_scatter": lambda api, a, **how: api.reduce_scatter(a(), a.many(), **how),
    "reduce_scatter_tensor": lambda api, a, **how: api.reduce_scatter_tensor(a(), a(9), **how),
    "all_to_all": lambda api, a, **how: api.all_to_all(a.many(), a.many(), **how),
    "all_to_all_single": lambda api, a, **how: api.all_to_all_single(a(), a(), **how),
    "barrier": lambda api, a, **how: api.barrier(**how),
    "broadcast_object_list": lambda api, a, **how: api.broadcast_object_list(["a"], **{"src": 0, **how}),
    "all_gather_object": lambda api, a, **how: api.all_gather_object([None] * 3, "a", **how),
    "gather_object": lambda api, a, **how: api.gather_object("a", None, **{"dst": a.other, **how}),
    "scatter_object_list": lambda api, a, **how: api.scatter_object_list([None], None, **{"src": a.other, **how}),
    "all_to_all_object": lambda api, a, **how: api.all_to_all_object([None] * 3, ["a"] * 3, **how),
}
MESSAGES: dict[str, Callable[..., Any]] = {
    "send": lambda api, a, **how: api.send(a(), **{"dst": a.other, **how}),
    "isend": lambda api, a, **how: api.isend(a(), **{"dst": a.other, **how}),
    "recv": lambda api, a, **how: api.recv(a(), **{"src": a.other, **how}),
    "irecv": lambda api, a, **how: api.irecv(a(), **{"src": a.other, **how}),
    "send_object_list": lambda api, a, **how: api.send_object_list(["a"], **{"dst": a.other, **how}),
    "recv_object_list": lambda api, a, **how: api.recv_object_list([None], **{"src": a.other, **how}),
}
GROUPS: dict[str, Callable[..., Any]] = {
    "get_rank": lambda api, a, **how: api.get_rank(**how),
    "get_world_size": lambda api, a, **how: api.get_world_size(**how),
    "get_backend": lambda api, a, **how: api.get_backend(**how),
    "get_backend_config": lambda api, a, **how: api.get_backend_config(**how),
    "get_process_group_ranks": lambda api, a, **how: api.get_process_group_ranks(**how),
    "get_group_rank": lambda api, a, **how: api.get_group_rank(global_rank=0, **how),
    "get_global_rank": lambda api, a, **how: api.get_global_rank(group_rank=0, **how),
    "destroy_process_group": lambda api, a, **how: api.destroy_process_group(**how),
}
NEW_GROUPS: dict[str, Callable[..., Any]] = {
    "new_group": lambda api, a, **how: api.new_group(**{"ranks": [a.rank], **how}),
    "new_subgroups": lambda api, a, **how: api.new_subgroups(**{"group_size": 1, **how}),
    "split_group": lambda api, a, **how: api.split_group(None, [[0], [1, 2]], **how),
}
EVERY = COLLECTIVES | MESSAGES | GROUPS | NEW_GROUPS
"""Functions of all ranks, of two, about groups and that make some; right calls, but for further arguments ``how``."""
ROOTS = {
    "reduce": "dst", "broadcast": "src", "gather": "dst", "scatter": "src",
    "broadcast_object_list": "src", "gather_object": "dst", "scatter_object_list": "src",
    "send": "dst", "isend": "dst", "recv": "src", "irecv": "src", "send_object_list": "dst", "recv_object_list": "src",
}  # fmt: skip
"""The argument that names a rank, by function; ``group_src`` and ``group_dst`` name it by its number in the group."""


def _with_root(suffix: str, rank: Any = None, group_rank: Any = None) -> dict[str, Call]:
    """Return a call of every function with a root, with this one."""
    return {
        f"{name}_{suffix}": partial(EVERY[name], **{root: rank, f"group_{root}": group_rank})
        for name, root in ROOTS.items()
    }


def _with(suffix: str, functions: Iterable[str], **how: Any) -> dict[str, Call]:
    """Return a call of each of some functions with further arguments."""
    return {f"{name}_{suffix}": partial(EVERY[name], **how) for name in functions}


UNDEFINED = r"ReduceOp.\w+ is not defined for \w+"

WRONG: dict[str, Wrong] = {
    **_wrong(
        ValueError, r"=3 is not in (the group|group 'world'), whose ranks are \[0, 1, 2\]",
        **_with_root("with_rank_3", 3),
        broadcast_multigpu_from_rank_3=lambda api, a: api.broadcast_multigpu(a.many(), src=3),
        reduce_multigpu_to_rank_3=lambda api, a: api.reduce_multigpu(a.many(), dst=3),
    ),
    **_wrong(
        ValueError, r"=-1 is not in the group", request=r"query\.(src|dst)",
        **_with_root("with_rank_minus_1", -1),
    ),
    **_wrong(
        ValueError, r"group_(src|dst)=3 is not in the group, whose ranks are 0 to 2",
        **_with_root("with_group_rank_3", None, 3),
    ),
    **_wrong(
        ValueError, "not both",
        **_with_root("with_two_ranks", 0, 0),
        message_with_two_peers=lambda api, a: api.P2POp(api.isend, a(), a.other, group_peer=a.other),
    ),
    **_wrong(
        ValueError, r"(src|dst|peer) is missing: give \1 \(a global rank\) or group_\1", "(src|dst) is missing",
        broadcast_without_a_source=lambda api, a: api.broadcast(a()),
        reduce_without_a_destination=lambda api, a: api.reduce(a()),
        send_without_a_destination=lambda api, a: api.send(a()),
        isend_without_a_destination=lambda api, a: api.isend(a()),
        message_without_a_peer=lambda api, a: api.P2POp(api.isend, a()),
        send_object_list_without_a_destination=lambda api, a: api.send_object_list(["a"]),
    ),
    **_wrong(
        TypeError, "must be a whole number", request=r"query\.(src|dst|tag)",
        **_with_root("with_half_a_rank", 0.5),
        **_with_root("with_a_named_group_rank", None, "0"),
        reduce_to_a_name=lambda api, a: api.reduce(a(), dst="zero"),
        broadcast_from_a_list=lambda api, a: api.broadcast(a(), src=[0]),
        broadcast_from_true=lambda api, a: api.broadcast(a(), src=True),
        send_with_half_a_tag=lambda api, a: api.send(a(), dst=a.other, tag=1.5),
        isend_with_a_named_tag=lambda api, a: api.isend(a(), dst=a.other, tag="one"),
        irecv_without_a_tag=lambda api, a: api.irecv(a(), src=a.other, tag=None),
        split_sizes_that_are_no_numbers=lambda api, a: api.all_to_all_single(a(), a(), [1.0] * 3),
    ),
    **_wrong(
        ValueError, "tag must be a whole number of 64 bits", request=r"query\.tag",
        recv_with_a_tag_of_65_bits=lambda api, a: api.recv(a(), src=a.other, tag=1 << 64),
        irecv_with_a_negative_tag_of_65_bits=lambda api, a: api.irecv(a(), src=a.other, tag=-(1 << 63) - 1),
    ),
    **_wrong(
        ValueError, "is this rank: begin both sides of the message, isend and irecv", "is this agent's own rank",
        send_to_itself=lambda api, a: api.send(a(), dst=a.rank),
        recv_from_itself=lambda api, a: api.recv(a(), src=a.rank),
        isend_to_itself=lambda api, a: api.isend(a(), group_dst=a.rank).wait(),
        irecv_from_itself=lambda api, a: api.irecv(a(), group_src=a.rank).wait(),
        messages_to_itself=lambda api, a: api.batch_isend_irecv([api.P2POp(api.isend, a(), a.rank)])[0].wait(),
    ),
    **_wrong(
        ValueError, "is this rank: the call waits, and would wait for itself; copy", "is this agent's own rank",
        send_object_list_to_itself=lambda api, a: api.send_object_list(["a"], dst=a.rank),
        recv_object_list_from_itself=lambda api, a: api.recv_object_list([None], src=a.rank),
    ),
    **_wrong(
        ValueError, "has [024] arrays, but the group has 3 ranks", "the array must be a stack of 3",
        all_gather_into_no_arrays=lambda api, a: api.all_gather([], a()),
        all_gather_into_too_few=lambda api, a: api.all_gather(a.many(2), a()),
        all_gather_into_too_many=lambda api, a: api.all_gather(a.many(4), a()),
        gather_into_too_few=lambda api, a: api.gather(a(), a.many(2), dst=a.rank),
        gather_into_no_arrays=lambda api, a: api.gather(a(), [], dst=a.rank),
        scatter_of_no_arrays=lambda api, a: api.scatter(a(), [], src=a.rank),
        scatter_of_too_many=lambda api, a: api.scatter(a(), a.many(4), src=a.rank),
        reduce_scatter_of_too_few=lambda api, a: api.reduce_scatter(a(), a.many(2)),
        all_to_all_of_too_few=lambda api, a: api.all_to_all(a.many(), a.many(2)),
        all_to_all_into_too_many=lambda api, a: api.all_to_all(a.many(4), a.many()),
    ),
    **_wrong(
        TypeError, "must be a list of 3 arrays",
        all_gather_into_an_array=lambda api, a: api.all_gather(a(), a()),
        all_gather_into_nothing=lambda api, a: api.all_gather(None, a()),
        reduce_scatter_of_an_array=lambda api, a: api.reduce_scatter(a(), a()),
        all_to_all_of_an_array=lambda api, a: api.all_to_all(a.many(), a()),
        all_to_all_into_an_array=lambda api, a: api.all_to_all(a(), a.many()),
        gather_into_an_array=lambda api, a: api.gather(a(), a(), dst=a.rank),
        gather_into_an_iterator=lambda api, a: api.gather(a(), iter(a.many()), dst=a.rank),
        scatter_of_an_array=lambda api, a: api.scatter(a(), a(), src=a.rank),
        scatter_of_a_dictionary=lambda api, a: api.scatter(a(), dict(enumerate(a.many())), src=a.rank),
    ),
    **_wrong(
        ValueError, "is missing: on the (destination|source) rank give a list of one array a rank",
        gather_into_nothing=lambda api, a: api.gather(a(), None, dst=a.rank),
        scatter_of_nothing=lambda api, a: api.scatter(a(), None, src=a.rank),
    ),
    **_wrong(
        ValueError, "gather_tensor is missing: on the destination rank give an array for all ranks' elements",
        gather_single_into_nothing=lambda api, a: api.gather_single(a(), None, dst=a.rank),
    ),
    **_wrong(
        ValueError, "is only for the (destination|source) rank: leave it out on this one",
        gather_with_a_list_elsewhere=lambda api, a: api.gather(a(), a.many(), dst=a.other),
        scatter_with_a_list_elsewhere=lambda api, a: api.scatter(a(), a.many(), src=a.other),
    ),
    **_wrong(
        ValueError, "2 elements, but .* has 3",
        all_gather_into_smaller_ones=lambda api, a: api.all_gather(a.many(count=2), a()),
        gather_into_smaller_ones=lambda api, a: api.gather(a(), a.many(count=2), dst=a.rank),
        scatter_of_smaller_ones=lambda api, a: api.scatter(a(), a.many(count=2), src=a.rank),
        reduce_scatter_of_smaller_ones=lambda api, a: api.reduce_scatter(a(), a.many(count=2)),
    ),
    **_wrong(
        ValueError, r"has 8 elements, but must have 3 times the 3 of \w+, 9",
        all_gather_into_a_smaller_one=lambda api, a: api.all_gather_into_tensor(a(8), a(3)),
        gather_single_into_a_smaller_one=lambda api, a: api.gather_single(a(3), a(8), dst=a.rank),
        reduce_scatter_of_a_smaller_one=lambda api, a: api.reduce_scatter_tensor(a(3), a(8)),
    ),
    **_wrong(
        ValueError, r"^(output|input|\w+_tensor|\w+_list\[[01]\]) has dtype float64, but \w+(\[0\])? has float32:",
        all_gather_of_another_dtype=lambda api, a: api.all_gather(a.many(dtype=float), a()),
        all_gather_into_several_dtypes=lambda api, a: api.all_gather([a(), a(dtype=float), a()], a()),
        gather_single_of_another_dtype=lambda api, a: api.gather_single(a(), a(9, float), dst=a.rank),
        all_gather_single_of_another_dtype=lambda api, a: api.all_gather_into_tensor(a(9, float), a()),
        gather_of_another_dtype=lambda api, a: api.gather(a(), a.many(dtype=float), dst=a.rank),
        scatter_of_another_dtype=lambda api, a: api.scatter(a(), a.many(dtype=float), src=a.rank),
        reduce_scatter_of_another_dtype=lambda api, a: api.reduce_scatter(a(), a.many(dtype=float)),
        reduce_scatter_single_of_another_dtype=lambda api, a: api.reduce_scatter_tensor(a(), a(9, float)),
        all_to_all_of_another_dtype=lambda api, a: api.all_to_all(a.many(dtype=float), a.many()),
        all_to_all_of_several_dtypes=lambda api, a: api.all_to_all(a.many(), [a(), a(dtype=float), a()]),
        all_to_all_single_of_another_dtype=lambda api, a: api.all_to_all_single(a(dtype=float), a()),
    ),
    **_wrong(
        ValueError, "is read-only, and the operation writes to it; pass a writable copy",
        all_reduce_of_a_read_only_array=lambda api, a: api.all_reduce(a.read_only()),
        reduce_into_a_read_only_array=lambda api, a: api.reduce(a.read_only(), dst=a.rank),
        broadcast_into_a_read_only_array=lambda api, a: api.broadcast(a.read_only(), src=a.other),
        all_gather_into_a_read_only_array=lambda api, a: api.all_gather([a(), a(), a.read_only()], a()),
        all_gather_single_into_a_read_only_array=lambda api, a: api.all_gather_into_tensor(a.read_only(9), a()),
        gather_into_a_read_only_array=lambda api, a: api.gather(a(), [a.read_only(), a(), a()], dst=a.rank),
        scatter_into_a_read_only_array=lambda api, a: api.scatter(a.read_only(), src=a.other),
        reduce_scatter_into_a_read_only_array=lambda api, a: api.reduce_scatter(a.read_only(), a.many()),
        reduce_scatter_tensor_into_a_read_only_array=lambda api, a: api.reduce_scatter_tensor(a.read_only(), a(9)),
        all_to_all_into_a_read_only_array=lambda api, a: api.all_to_all([a(), a.read_only(), a()], a.many()),
        all_to_all_single_into_a_read_only_array=lambda api, a: api.all_to_all_single(a.read_only(), a()),
        recv_into_a_read_only_array=lambda api, a: api.recv(a.read_only(), src=a.other),
        all_reduce_multigpu_of_a_read_only_array=lambda api, a: api.all_reduce_multigpu([a(), a.read_only()]),
        all_gather_multigpu_into_a_read_only_array=lambda api, a: api.all_gather_multigpu(
            [[a(), a(), a.read_only()]], [a()]
        ),
        all_reduce_of_read_only_bytes=lambda api, a: api.all_reduce(b"abc"),
        batch_with_a_read_only_array=lambda api, a: _batch(api, a(), a.read_only()),
    ),
    **_wrong(
        ValueError, "has elements that share memory",
        all_reduce_of_an_expanded_array=lambda api, a: api.all_reduce(a.expanded()),
    ),
    **_wrong(
        TypeError, UNDEFINED,
        all_reduce_max_of_complex=lambda api, a: api.all_reduce(a(dtype=complex), op=MAX),
        all_reduce_average_of_bool=lambda api, a: api.all_reduce(a(dtype=bool), op=AVG),
        reduce_bits_of_floats=lambda api, a: api.reduce(a(), dst=0, op=ReduceOp.BXOR),
        reduce_scatter_min_of_complex=lambda api, a: api.reduce_scatter(
            a(dtype=complex), a.many(dtype=complex), op=MIN
        ),
        all_reduce_premultiplied_bool=lambda api, a: api.all_reduce(a(dtype=bool), op=PREMUL_SUM(1)),
        reduce_scatter_tensor_bits_of_floats=lambda api, a: api.reduce_scatter_tensor(a(), a(9), op=BAND),
        all_reduce_coalesced_bits_of_floats=lambda api, a: api.all_reduce_coalesced(a.many(), op=BOR),
        all_reduce_multigpu_bits_of_floats=lambda api, a: api.all_reduce_multigpu(a.many(), op=BOR),
        reduce_multigpu_bits_of_floats=lambda api, a: api.reduce_multigpu(a.many(), dst=0, op=BOR),
        reduce_scatter_multigpu_bits_of_floats=lambda api, a: api.reduce_scatter_multigpu([a()], [a.many()], op=BOR),
    ),
    **_wrong(
        TypeError, "PREMUL_SUM", "factor|PREMUL_SUM",
        all_reduce_premultiplied_by_nothing=lambda api, a: api.all_reduce(a(), op=PREMUL_SUM),
        all_reduce_premultiplied_by_too_much=lambda api, a: api.all_reduce(a(dtype=np.int8), op=PREMUL_SUM(200)),
    ),
    **_wrong(
        TypeError, "op must be a rankmesh.ReduceOp", request=r"query\.op",
        all_reduce_by_name=lambda api, a: api.all_reduce(a(), op="SUM"),
        all_reduce_by_nothing=lambda api, a: api.all_reduce(a(), op=None),
        reduce_by_number=lambda api, a: api.reduce(a(), dst=0, op=99),
        reduce_scatter_by_name=lambda api, a: api.reduce_scatter(a(), a.many(), op="sum "),
    ),
    **_wrong(
        ValueError, r"(in|out)put_split_sizes=\[.*\] must be 3 numbers, one a rank, that add up to the 3 rows",
        all_to_all_single_of_too_few_rows=lambda api, a: api.all_to_all_single(a(), a(), None, [1, 1, 0]),
        all_to_all_single_of_too_many_rows=lambda api, a: api.all_to_all_single(a(), a(), None, [1, 1, 2]),
        all_to_all_single_into_too_few_rows=lambda api, a: api.all_to_all_single(a(), a(), [1, 0, 1], [1, 1, 1]),
        all_to_all_single_with_too_few_splits=lambda api, a: api.all_to_all_single(a(), a(), None, [2, 1]),
        all_to_all_single_with_negative_splits=lambda api, a: api.all_to_all_single(a(), a(), None, [5, -1, -1]),
    ),
    **_wrong(
        ValueError, "rows, which do not divide evenly by the group's 3 ranks: give (in|out)put_split_sizes",
        all_to_all_single_of_uneven_rows=lambda api, a: api.all_to_all_single(a(3), a(4)),
        all_to_all_single_into_uneven_rows=lambda api, a: api.all_to_all_single(a(4), a(3)),
    ),
    **_wrong(
        TypeError, r"cannot be communicated|must be a NumPy array", "dtype (<U1|object|datetime64)",
        all_reduce_of_text=lambda api, a: api.all_reduce(np.array(["a"])),
        all_reduce_of_objects=lambda api, a: api.all_reduce(np.array([None])),
        all_gather_of_dates=lambda api, a: api.all_gather(a.many(), np.array(["2020-01-01"], "M8[D]")),
        all_reduce_of_a_list=lambda api, a: api.all_reduce([1.0]),
        all_reduce_of_nothing=lambda api, a: api.all_reduce(None),
        all_reduce_of_a_number=lambda api, a: api.all_reduce(3.0),
        reduce_of_a_list=lambda api, a: api.reduce([1.0], dst=0),
        broadcast_of_a_string=lambda api, a: api.broadcast("text", src=0),
        all_gather_of_a_list=lambda api, a: api.all_gather(a.many(), [1.0]),
        all_gather_single_into_a_list=lambda api, a: api.all_gather_into_tensor(a.many(), a()),
        gather_of_a_list=lambda api, a: api.gather([1.0], a.many(), dst=a.rank),
        scatter_into_a_list=lambda api, a: api.scatter([1.0], a.many(), src=a.rank),
        reduce_scatter_into_nothing=lambda api, a: api.reduce_scatter(None, a.many()),
        reduce_scatter_single_of_a_list=lambda api, a: api.reduce_scatter_tensor(a(), a.many()),
        all_to_all_single_of_a_list=lambda api, a: api.all_to_all_single(a(), [1.0] * 3),
        send_of_a_number=lambda api, a: api.send(1.0, dst=a.other),
        recv_into_a_list=lambda api, a: api.recv([0.0], src=a.other),
        isend_of_nothing=lambda api, a: api.isend(None, dst=a.other),
        irecv_into_a_string=lambda api, a: api.irecv("text", src=a.other),
        all_reduce_coalesced_of_a_number=lambda api, a: api.all_reduce_coalesced([1.0]),
    ),
    **_wrong(
        TypeError, r"(tensors|_list)\[0\] must be a NumPy array",
        all_gather_into_numbers=lambda api, a: api.all_gather([1.0, 2.0, 3.0], a()),
        gather_into_numbers=lambda api, a: api.gather(a(), [1.0, 2.0, 3.0], dst=a.rank),
        scatter_of_numbers=lambda api, a: api.scatter(a(), [1.0, 2.0, 3.0], src=a.rank),
        all_to_all_into_numbers=lambda api, a: api.all_to_all([1.0, 2.0, 3.0], a.many()),
        reduce_scatter_of_numbers=lambda api, a: api.reduce_scatter(a(), [1.0, 2.0, 3.0]),
        all_to_all_of_numbers=lambda api, a: api.all_to_all(a.many(), [1.0, 2.0, 3.0]),
    ),
    **_wrong(
        ValueError, "timeout", request=r"query\.timeout",
        **_with("with_a_negative_timeout", [*COLLECTIVES, "send", "recv"], timeout=-1),
        **_with("with_a_negative_timeout", NEW_GROUPS, timeout=-1),
        barrier_with_a_timeout_that_is_no_number=lambda api, a: api.barrier(timeout=float("nan")),
        batch_with_a_negative_timeout=lambda api, a: _batch(api, timeout=-1),
    ),
    **_wrong(
        TypeError, "timeout must be a datetime.timedelta or a number of seconds", request=r"query\.timeout",
        **_with("with_a_named_timeout", ["barrier", "recv"], timeout="soon"),
        barrier_with_a_list_of_timeouts=lambda api, a: api.barrier(timeout=[5]),
    ),
    **_wrong(
        TypeError, "group must be a ProcessGroup from new_group",
        **_with("in_a_named_group", [*COLLECTIVES, *MESSAGES, *GROUPS], group="world"),
        broadcast_in_group_1=lambda api, a: api.broadcast(a(), 0, group=1),
        barrier_in_a_list_of_ranks=lambda api, a: api.barrier(group=[0, 1, 2]),
        batch_in_a_named_group=lambda api, a: _batch(api, group="world"),
    ),
    **_wrong(
        TypeError, "device_ids must be a list of device numbers",
        barrier_on_device_0=lambda api, a: api.barrier(device_ids=0),
        barrier_on_a_set_of_devices=lambda api, a: api.barrier(device_ids={0}),
    ),
    **_wrong(
        TypeError, "(tensors|input_tensor_list|output_tensor_lists|output_tensor_lists\\[0\\]) must be a list",
        all_reduce_coalesced_of_an_array=lambda api, a: api.all_reduce_coalesced(a()),
        all_reduce_coalesced_of_nothing=lambda api, a: api.all_reduce_coalesced(None),
        all_gather_coalesced_of_an_array=lambda api, a: api.all_gather_coalesced([[a()]] * 3, a()),
        all_gather_coalesced_into_nothing=lambda api, a: api.all_gather_coalesced(None, [a()]),
        all_gather_coalesced_into_arrays=lambda api, a: api.all_gather_coalesced(a.many(), [a()]),
    ),
    **_wrong(
        ValueError, r"output_tensor_lists\[0\] has 1 arrays, input_tensor_list 2|has [04] lists, but the group has 3",
        all_gather_coalesced_into_too_few=lambda api, a: api.all_gather_coalesced([[a()]] * 3, [a(), a()]),
        all_gather_coalesced_into_no_lists=lambda api, a: api.all_gather_coalesced([], [a()]),
        all_gather_coalesced_into_too_many_lists=lambda api, a: api.all_gather_coalesced([[a()]] * 4, [a()]),
    ),
    **_wrong(
        TypeError, "must be a list of arrays, got",
        broadcast_multigpu_of_nothing=lambda api, a: api.broadcast_multigpu(None, 0),
        all_reduce_multigpu_of_an_array=lambda api, a: api.all_reduce_multigpu(a()),
        reduce_multigpu_of_text=lambda api, a: api.reduce_multigpu("x", 0),
        all_gather_multigpu_of_an_array=lambda api, a: api.all_gather_multigpu([a.many()], a()),
        all_gather_multigpu_into_nothing=lambda api, a: api.all_gather_multigpu(None, [a()]),
        all_gather_multigpu_into_arrays=lambda api, a: api.all_gather_multigpu(a.many(), a.many()),
        reduce_scatter_multigpu_into_an_array=lambda api, a: api.reduce_scatter_multigpu(a(), [a.many()]),
        reduce_scatter_multigpu_of_nothing=lambda api, a: api.reduce_scatter_multigpu([a()], None),
        reduce_scatter_multigpu_of_arrays=lambda api, a: api.reduce_scatter_multigpu(a.many(), a.many()),
    ),
    **_wrong(
        ValueError, "is empty: give at least one array",
        broadcast_multigpu_of_no_arrays=lambda api, a: api.broadcast_multigpu([], 0),
        all_reduce_multigpu_of_no_arrays=lambda api, a: api.all_reduce_multigpu([]),
        reduce_multigpu_of_no_arrays=lambda api, a: api.reduce_multigpu([], 0),
        all_gather_multigpu_of_no_arrays=lambda api, a: api.all_gather_multigpu([a.many()], []),
        reduce_scatter_multigpu_into_no_arrays=lambda api, a: api.reduce_scatter_multigpu([], [a.many()]),
    ),
    **_wrong(
        ValueError, r"has \d arrays, but must have \d|input_tensor_lists has 1 lists, but there are 2 outputs",
        all_gather_multigpu_into_too_few=lambda api, a: api.all_gather_multigpu([a.many(2)], [a()]),
        reduce_scatter_multigpu_of_too_few_lists=lambda api, a: api.reduce_scatter_multigpu(a.many(2), [a.many(6)]),
        reduce_scatter_multigpu_of_too_few=lambda api, a: api.reduce_scatter_multigpu(a.many(2), [a.many(6), [a()]]),
    ),
    **_wrong(
        ValueError, r"(src|dst)_tensor=(1|-1) is not in the list, which has 1 arrays",
        broadcast_multigpu_of_another_array=lambda api, a: api.broadcast_multigpu([a()], 0, src_tensor=1),
        reduce_multigpu_into_another_array=lambda api, a: api.reduce_multigpu([a()], 0, dst_tensor=-1),
    ),
    **_wrong(
        ValueError, r"^\w+_list is missing: give a list of 3 items, one a rank",
        all_gather_object_into_nothing=lambda api, a: api.all_gather_object(None, 1),
        gather_object_into_nothing=lambda api, a: api.gather_object(1, None, dst=a.rank),
        scatter_object_list_of_nothing=lambda api, a: api.scatter_object_list([None], None, src=a.rank),
        all_to_all_object_into_nothing=lambda api, a: api.all_to_all_object(None, [1, 2, 3]),
        all_to_all_object_of_nothing=lambda api, a: api.all_to_all_object([None] * 3, None),
    ),
    **_wrong(
        ValueError, r"^\w+_list has [04] items, but the group has 3 ranks",
        all_gather_object_into_an_empty_list=lambda api, a: api.all_gather_object([], 1),
        gather_object_into_too_many=lambda api, a: api.gather_object(1, [None] * 4, dst=a.rank),
        scatter_object_list_of_too_many=lambda api, a: api.scatter_object_list([None], [1] * 4, src=a.rank),
        all_to_all_object_into_an_empty_list=lambda api, a: api.all_to_all_object([], [1, 2, 3]),
        all_to_all_object_of_too_many=lambda api, a: api.all_to_all_object([None] * 3, [1] * 4),
    ),
    **_wrong(
        TypeError, r"^\w+_list must be a list of 3 items, one a rank, got ",
        all_gather_object_into_a_tuple=lambda api, a: api.all_gather_object((None,) * 3, 1),
        gather_object_into_text=lambda api, a: api.gather_object(1, "abc", dst=a.rank),
        scatter_object_list_of_a_dictionary=lambda api, a: api.scatter_object_list([None], {1: 2}, src=a.rank),
        all_to_all_object_into_an_array=lambda api, a: api.all_to_all_object(a(), [1, 2, 3]),
        all_to_all_object_of_a_number=lambda api, a: api.all_to_all_object([None] * 3, 3),
    ),
    **_wrong(
        TypeError, "object_list must be a list of objects, got",
        broadcast_object_list_of_nothing=lambda api, a: api.broadcast_object_list(None, 0),
        broadcast_object_list_of_a_tuple=lambda api, a: api.broadcast_object_list(("a",), 0),
        recv_object_list_into_text=lambda api, a: api.recv_object_list("a", a.other),
    ),
    **_wrong(
        ValueError, r"scatter_object_output_list must be a list, .*: pass \[None\]",
        scatter_object_list_into_nothing=lambda api, a: api.scatter_object_list(None, [1] * 3, a.rank),
        scatter_object_list_into_an_empty_list=lambda api, a: api.scatter_object_list([], [1] * 3, a.rank),
        scatter_object_list_into_text=lambda api, a: api.scatter_object_list("a", [1] * 3, a.rank),
    ),
    **_wrong(
        ValueError, "object_gather_list is only for the destination rank: leave it out on this one",
        gather_object_with_a_list_elsewhere=lambda api, a: api.gather_object(1, [None] * 3, dst=a.other),
    ),
    **_wrong(
        ValueError, "all arrays must have the same dtype and number of elements",
        all_reduce_multigpu_of_several_dtypes=lambda api, a: api.all_reduce_multigpu([a(), a(dtype=float)]),
        broadcast_multigpu_of_several_sizes=lambda api, a: api.broadcast_multigpu([a(), a(4)], src=0),
        reduce_multigpu_of_several_sizes=lambda api, a: api.reduce_multigpu([a(), a(4)], dst=0),
        all_gather_multigpu_of_several_sizes=lambda api, a: api.all_gather_multigpu([a.many(6)] * 2, [a(), a(4)]),
        all_gather_multigpu_into_other_dtypes=lambda api, a: api.all_gather_multigpu([[a(), a(dtype=int), a()]], [a()]),
        reduce_scatter_multigpu_into_other_dtypes=lambda api, a: api.reduce_scatter_multigpu(
            [a(), a(dtype=float)], [a.many(6)] * 2
        ),
        reduce_scatter_multigpu_of_several_sizes=lambda api, a: api.reduce_scatter_multigpu([a()], [[a(), a(4), a()]]),
    ),
    **_wrong(
        ValueError, r"(global|group) rank (3|-1) is not in the group, whose ranks are",
        get_group_rank_of_rank_3=lambda api, a: api.get_group_rank(None, 3),
        get_group_rank_of_rank_minus_1=lambda api, a: api.get_group_rank(None, -1),
        get_global_rank_of_rank_3=lambda api, a: api.get_global_rank(None, 3),
        get_global_rank_of_rank_minus_1=lambda api, a: api.get_global_rank(None, -1),
    ),
    **_wrong(
        TypeError, "_rank must be a whole number",
        get_group_rank_of_a_name=lambda api, a: api.get_group_rank(None, "0"),
        get_global_rank_of_nothing=lambda api, a: api.get_global_rank(None, None),
    ),
    **_wrong(
        ValueError, "at least one|twice|0 to 2|in two groups",
        new_group_of_no_ranks=lambda api, a: api.new_group([]),
        new_group_of_a_rank_twice=lambda api, a: api.new_group([0, 0]),
        new_group_of_rank_3=lambda api, a: api.new_group([0, 3]),
        new_group_of_rank_minus_1=lambda api, a: api.new_group([-1, 0]),
        new_subgroups_by_enumeration_of_no_ranks=lambda api, a: api.new_subgroups_by_enumeration([[]]),
        new_subgroups_by_enumeration_of_a_rank_twice=lambda api, a: api.new_subgroups_by_enumeration([[0], [0]]),
        new_subgroups_by_enumeration_of_rank_3=lambda api, a: api.new_subgroups_by_enumeration([[0], [3]]),
        split_group_into_no_ranks=lambda api, a: api.split_group(None, [[]]),
        split_group_into_a_rank_twice=lambda api, a: api.split_group(None, [[0], [0, 1]]),
        split_group_into_rank_minus_1=lambda api, a: api.split_group(None, [[-1]]),
        shrink_group_by_no_ranks=lambda api, a: api.shrink_group([]),
        shrink_group_by_rank_3=lambda api, a: api.shrink_group([3]),
        shrink_group_by_a_rank_twice=lambda api, a: api.shrink_group([a.other] * 2),
    ),
    **_wrong(
        TypeError, "must be a list of ranks",
        new_group_of_a_number=lambda api, a: api.new_group(1),
        new_group_of_names=lambda api, a: api.new_group(["0", "1"]),
        new_group_of_half_a_rank=lambda api, a: api.new_group([0.5]),
        new_group_of_lists=lambda api, a: api.new_group([[0]]),
        new_group_of_true=lambda api, a: api.new_group([True]),
        new_subgroups_by_enumeration_of_numbers=lambda api, a: api.new_subgroups_by_enumeration([0, 1]),
        shrink_group_by_nothing=lambda api, a: api.shrink_group(None),
        shrink_group_by_a_name=lambda api, a: api.shrink_group("0"),
    ),
    **_wrong(
        ValueError, "'smoke-signals' is not known: use 'mesh'",
        **_with("with_an_unknown_backend", NEW_GROUPS, backend="smoke-signals"),
    ),
    **_wrong(
        ValueError, "does not divide the group's 3 ranks",
        new_subgroups_of_none=lambda api, a: api.new_subgroups(0),
        new_subgroups_of_a_negative_size=lambda api, a: api.new_subgroups(-1),
        new_subgroups_of_two=lambda api, a: api.new_subgroups(2),
        new_subgroups_of_four=lambda api, a: api.new_subgroups(4),
    ),
    **_wrong(
        ValueError, "(ranks_per_subgroup_list|split_ranks) must be a list of at least one",
        new_subgroups_by_enumeration_of_nothing=lambda api, a: api.new_subgroups_by_enumeration(None),
        new_subgroups_by_enumeration_of_no_lists=lambda api, a: api.new_subgroups_by_enumeration([]),
        split_group_into_nothing=lambda api, a: api.split_group(None, None),
        split_group_into_no_lists=lambda api, a: api.split_group(None, []),
        split_group_into_an_array=lambda api, a: api.split_group(None, a()),
    ),
    **_wrong(
        RuntimeError, "cannot exclude itself",
        shrink_group_by_this_rank=lambda api, a: api.shrink_group([a.rank]),
    ),
    **_wrong(
        ValueError, "shrink_flags",
        shrink_group_with_unknown_flags=lambda api, a: api.shrink_group([a.other], shrink_flags=2),
        shrink_group_with_flags_that_are_text=lambda api, a: api.shrink_group([a.other], shrink_flags="1"),
    ),
    **_wrong(
        ValueError, "p2p_op_list is empty",
        no_messages=lambda api, a: api.batch_isend_irecv([]),
    ),
    **_wrong(
        TypeError, "p2p_op_list must be a list of P2POp",
        messages_that_are_numbers=lambda api, a: api.batch_isend_irecv([1, 2]),
        messages_that_are_an_array=lambda api, a: api.batch_isend_irecv(a()),
        messages_that_are_none=lambda api, a: api.batch_isend_irecv(None),
    ),
    **_wrong(
        ValueError, r"op must be rankmesh\.isend or rankmesh\.irecv, got",
        message_with_the_blocking_function=lambda api, a: api.P2POp(api.send, a(), a.other),
        message_by_broadcast=lambda api, a: api.P2POp(api.broadcast, a(), a.other),
        message_by_name=lambda api, a: api.P2POp("isend", a(), a.other),
    ),
}  # fmt: skip


def _batch(api: Any, *arrays: Array, **how: Any) -> None:
    with api.batch(**how):
        for array in arrays:
            api.all_reduce(array)


MISMATCHED: dict[str, Call] = {
    "other_sizes": lambda api, a: api.all_reduce(a(3 if a.rank else 4)),
    "other_sizes_of_large_arrays": lambda api, a: api.all_reduce(a(LARGE + a.rank)),
    "a_large_array_and_small_ones": lambda api, a: api.all_reduce(a(LARGE if a.rank == 1 else 1)),
    "a_small_array_and_large_ones": lambda api, a: api.all_reduce(a(10 if a.rank == 2 else LARGE)),
    "an_empty_array": lambda api, a: api.all_reduce(a(0 if a.rank == 2 else LARGE)),
    "barrier_and_empty_all_reduce": lambda api, a: api.barrier() if a.rank else api.all_reduce(a(0)),
    "barrier_and_empty_reduce": lambda api, a: api.barrier() if a.rank else api.reduce(a(0), dst=0),
    "barrier_and_empty_broadcast": lambda api, a: api.barrier() if a.rank else api.broadcast(a(0), src=0),
    "barrier_and_empty_all_gather": lambda api, a: api.barrier() if a.rank else api.all_gather(a.many(3, 0), a(0)),
    "barrier_and_empty_gather": lambda api, a: api.barrier() if a.rank else api.gather(a(0), None, dst=1),
    "barrier_and_empty_scatter": lambda api, a: api.barrier() if a.rank else api.scatter(a(0), None, src=1),
    "barrier_and_empty_reduce_scatter": lambda api, a: (
        api.barrier() if a.rank else api.reduce_scatter(a(0), a.many(3, 0))
    ),
    "barrier_and_empty_all_to_all": lambda api, a: (
        api.barrier() if a.rank else api.all_to_all(a.many(3, 0), a.many(3, 0))
    ),
    "other_dtypes_of_as_many_bytes": lambda api, a: api.all_reduce(a(dtype=np.float32 if a.rank else np.int32)),
    "other_operations": lambda api, a: api.all_reduce(a(), op=MAX if a.rank == 1 else SUM),
    "other_operations_on_large_arrays": lambda api, a: api.all_reduce(a(LARGE), op=MIN if a.rank == 2 else SUM),
    "a_factor_and_none": lambda api, a: api.all_reduce(a(), op=SUM if a.rank else PREMUL_SUM(2.0)),
    "other_functions": lambda api, a: api.all_reduce(a()) if a.rank else api.broadcast(a(), src=0),
    "barrier_and_all_reduce": lambda api, a: api.barrier() if a.rank else api.all_reduce(a(LARGE)),
    "gather_and_all_gather": lambda api, a: api.gather(a(), None, dst=0) if a.rank else api.all_gather(a.many(), a()),
    "gather_and_all_reduce": lambda api, a: api.all_reduce(a(LARGE)) if a.rank else api.gather(a(LARGE), None, dst=2),
    "broadcast_from_other_ranks": lambda api, a: api.broadcast(a(), src=a.rank),
    "large_broadcasts_from_other_ranks": lambda api, a: api.broadcast(a(LARGE), src=a.rank),
    "reduce_to_other_ranks": lambda api, a: api.reduce(a(), dst=a.rank),
    "large_reductions_to_other_ranks": lambda api, a: api.reduce(a(LARGE), dst=a.rank % 2),
    "scatter_from_other_ranks": lambda api, a: api.scatter(a(), a.many() if a.rank < 2 else None, src=a.rank % 2),
    "broadcast_of_other_sizes": lambda api, a: api.broadcast(a(3 + a.rank), src=0),
    "reduce_of_other_sizes": lambda api, a: api.reduce(a(3 + a.rank), dst=0),
    "gather_of_other_sizes": lambda api, a: api.gather(a(3 + a.rank), None if a.rank else a.many(), dst=0),
    "scatter_of_other_sizes": lambda api, a: api.scatter(a(3 + a.rank), None if a.rank else a.many(), src=0),
    "all_gather_of_unexpected_sizes": lambda api, a: api.all_gather(a.many(count=3 + a.rank), a(3 + a.rank)),
    "all_gather_of_sizes_in_another_order": lambda api, a: api.all_gather(
        [a(3 + (rank + a.rank) % SIZE) for rank in range(SIZE)], a(3 + 2 * a.rank % SIZE)
    ),
    "all_gather_single_of_other_sizes": lambda api, a: api.all_gather_into_tensor(a(3 * (3 + a.rank)), a(3 + a.rank)),
    "reduce_scatter_of_other_sizes": lambda api, a: api.reduce_scatter(a(3 + a.rank), a.many(count=3 + a.rank)),
    "reduce_scatter_single_of_other_sizes": lambda api, a: api.reduce_scatter_tensor(
        a(3 + a.rank), a(3 * (3 + a.rank))
    ),
    "all_to_all_of_unexpected_sizes": lambda api, a: api.all_to_all(a.many(count=2 if a.rank == 1 else 3), a.many()),
    "all_to_all_of_large_unexpected_sizes": lambda api, a: api.all_to_all(
        a.many(count=LARGE), a.many(count=LARGE + (a.rank == 2))
    ),
    "all_to_all_of_other_dtypes": lambda api, a: api.all_to_all(*[a.many(dtype=f"f{4 + 4 * (a.rank == 2)}")] * 2),
    "all_to_all_single_of_unexpected_sizes": lambda api, a: api.all_to_all_single(a(), a(), [0, 1, 2], [1, 1, 1]),
    "all_reduce_multigpu_of_other_lengths": lambda api, a: api.all_reduce_multigpu(a.many(1 + a.rank)),
    "batches_of_other_sizes": lambda api, a: _batch(api, a(2), a(3 + a.rank)),
    "batches_split_otherwise": lambda api, a: _batch(api, a(2 + a.rank), a(5 - a.rank)),
}
"""Calls that differ from rank to rank, by name."""

_SINGLE = r"\w+_(single|tensor)_\w+|(all_gather_into|reduce_scatter_of)_a_smaller_one|split_sizes_\w+"
_FACTORS = r"\w+_premultiplied_\w+|a_factor_and_none"
_LISTS_OF_DEVICES = r"\w+_(multigpu|coalesced)_\w+"

CANNOT: dict[str, dict[str, str]] = {
    "communicator": {
        "the SDK makes lists of single arrays, and batches of lists": f"{_SINGLE}|{_LISTS_OF_DEVICES}",
        "the SDK multiplies by factors": _FACTORS,
    },
    "http": {
        "there is no such endpoint": rf"{_SINGLE}|{_LISTS_OF_DEVICES}|\w+_object_\w+|(isend|irecv|message|batch)\w+"
        r"|no_messages|(get|new|split|shrink|destroy)_\w+",
        "there are no group ranks": r"\w+_group_rank(_3)?|\w+_two_ranks",
        "the group is in the path": r"\w+_in_(a_named_group|group_1|a_list_of_ranks)",
        "there are no devices": r"barrier_on_\w+",
        "parameters are text": "broadcast_from_(a_list|true)|barrier_with_a_list_of_timeouts",
        "outputs are in the response": r"\w+_into_\w+|all_to_all_of_(large_)?unexpected_sizes|gather_with_a_list\w+",
        "a rank that receives sends an example, which may be a stack": r"scatter_with_a_list\w+",
        "a stack is one array": r"\w+_of_(smaller_ones|(several|another)_dtypes?|an_array|no_arrays|nothing|numbers"
        "|a_dictionary)",
        "a body is a writable array": r"\w+_of_(a_list|a_number|a_string|an_expanded_array|(a_)?read_only_\w+)",
        "an operation that is left out is a sum": "all_reduce_by_nothing",
    },
    "torch": {
        "no tensor is read-only": r"\w+_read_only_\w+",
        "no tensor has such elements": "all_reduce_of_(text|objects)|all_gather_of_dates",
    },
    "torch.distributed": {
        "torch has no such function": r"\w+_multigpu_\w+|gather_single_\w+|batch\w+|all_to_all_object_\w+",
        "NCCL alone splits and shrinks groups": r"(split|shrink)_group_\w+",
        "no call but barrier has a timeout, and that is a timedelta": r"(?!barrier)\w+_with_a_(negative|named)_timeout"
        "|barrier_with_a_(negative_timeout|timeout_that_is_no_number)",
        "torch has sent sizes before it looks": r"(all_)?gather_object_into_\w+|gather_object_with_(?!two|a_list)\w+"
        r"|scatter_object_list_of_(too_many|a_dictionary)|broadcast_object_list_of_a_tuple|recv_object_list_into_text",
        "None is no group": r"get_(group|global)_rank_of_\w+",
        "torch takes it": r"new_group_of_(no_ranks|half_a_rank|true)|new_subgroups_by_enumeration_of_no_ranks"
        r"|new_subgroups_of_a_negative_size"
        r"|broadcast_from_true|barrier_on_\w+|all_reduce_coalesced_of_an_array",
        "NCCL alone has factors": r"all_reduce_premultiplied_(bool|by_too_much)|a_factor_and_none",
    },
    "gloo": {
        "it waits for other ranks, or crashes": r"\w*(send|recv)\w*_rank_(3|minus_1)|\w+_of_an_expanded_array"
        r"|\w+_average_of_bool|irecv_with_a_negative_tag_of_65_bits",
    },
}
"""Calls that a medium has no form for, by the reason; patterns of their names."""


def expressible(table: Iterable[str], *media: str) -> list[str]:
    """Return the names of the calls that can be made over all of the media."""
    patterns = [pattern for medium in media for pattern in CANNOT[medium].values()]
    return [name for name in table if not any(re.fullmatch(pattern, name) for pattern in patterns)]
