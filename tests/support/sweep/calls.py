"""The calls of the sweep: what a rank passes to a function, and what it must find in its arrays afterwards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from support.sweep.cell import At
from support.sweep.containers import Array


def _all_reduce(at: At) -> None:
    at.call(at.api.all_reduce, at.becomes(at.values(at.rank), at.reduced(at.values)), op=at.op)


def _reduce(at: At) -> None:
    mine = at.values(at.rank)
    at.call(
        at.api.reduce, at.becomes(mine, at.reduced(at.values) if at.is_root else mine), op=at.op, **at.root_as("dst")
    )


def _broadcast(at: At) -> None:
    at.call(at.api.broadcast, at.becomes(at.values(at.rank), at.values(at.cell.root)), **at.root_as("src"))


def _all_gather(at: At) -> None:
    outputs = [at.wanted(at.values(rank)) for rank in at.ranks]
    at.call(at.api.all_gather, outputs, at.given(at.values(at.rank)))


def _all_gather_uneven(at: At) -> None:
    outputs = [at.wanted(at.values(rank, _uneven(at, rank))) for rank in at.ranks]
    at.call(at.api.all_gather_v, outputs, at.given(at.values(at.rank, _uneven(at, at.rank))))


def _all_gather_coalesced(at: At) -> None:
    outputs = [[at.wanted(at.values(rank, lane=lane)) for lane in range(2)] for rank in at.ranks]
    at.call(at.api.all_gather_coalesced, outputs, [at.given(at.values(at.rank, lane=lane)) for lane in range(2)])


def _all_gather_into_tensor(at: At) -> None:
    everyone = _behind_one_another(at.values(rank) for rank in at.ranks)
    at.call(at.api.all_gather_into_tensor, at.wanted(everyone), at.given(at.values(at.rank)))


def _all_gather_single_stacked(at: At) -> None:
    everyone = _behind_one_another(at.values(rank) for rank in at.ranks)
    stack = at.shaped(np.zeros_like(everyone), everyone, at.size, at.cell.count)
    at.call(at.api.all_gather_single, stack, at.given(at.values(at.rank)))


def _all_gather_in_place(at: At) -> None:
    everyone = _behind_one_another(at.values(rank) for rank in at.ranks)
    before = np.ones_like(everyone).reshape(at.size, at.cell.count)
    before[at.rank] = at.values(at.rank)
    output = at.shaped(before, everyone, at.size, at.cell.count)
    at.call(at.api.all_gather_into_tensor, output, output[at.rank])


def _gather(at: At) -> None:
    outputs = [at.wanted(at.values(rank)) for rank in at.ranks] if at.is_root else None
    at.call(at.api.gather, at.given(at.values(at.rank)), outputs, **at.root_as("dst"))


def _gather_single(at: At) -> None:
    everyone = _behind_one_another(at.values(rank) for rank in at.ranks)
    output = at.wanted(everyone) if at.is_root else None
    at.call(at.api.gather_single, at.given(at.values(at.rank)), output, **at.root_as("dst"))


def _gather_uneven(at: At) -> None:
    outputs = [at.wanted(at.values(rank, _uneven(at, rank))) for rank in at.ranks] if at.is_root else None
    array = at.given(at.values(at.rank, _uneven(at, at.rank)))
    at.call(at.api.gather, array, outputs, **at.root_as("dst"), uneven=True)


def _scatter_uneven(at: At) -> None:
    inputs = [at.given(at.values(at.rank, _uneven(at, rank), rank)) for rank in at.ranks] if at.is_root else None
    output = at.wanted(at.values(at.cell.root, _uneven(at, at.rank), at.rank))
    at.call(at.api.scatter, output, inputs, **at.root_as("src"), uneven=True)


def _scatter(at: At) -> None:
    inputs = [at.given(at.values(at.rank, lane=rank)) for rank in at.ranks] if at.is_root else []
    at.call(at.api.scatter, at.wanted(at.values(at.cell.root, lane=at.rank)), inputs, **at.root_as("src"))


def _reduce_scatter(at: At) -> None:
    inputs = [at.given(at.values(at.rank, lane=owner)) for owner in at.ranks]
    output = at.wanted(at.reduced(lambda rank: at.values(rank, lane=at.rank)))
    at.call(at.api.reduce_scatter, output, inputs, op=at.op)


def _reduce_scatter_uneven(at: At) -> None:
    inputs = [at.given(at.values(at.rank, _uneven(at, owner), owner)) for owner in at.ranks]
    output = at.wanted(at.reduced(lambda rank: at.values(rank, _uneven(at, at.rank), at.rank)))
    at.call(at.api.reduce_scatter_v, output, inputs, op=at.op)


def _reduce_scatter_tensor(at: At) -> None:
    everyone = _behind_one_another(at.values(at.rank, lane=owner) for owner in at.ranks)
    output = at.wanted(at.reduced(lambda rank: at.values(rank, lane=at.rank)))
    at.call(at.api.reduce_scatter_tensor, output, at.given(everyone), op=at.op)


def _reduce_scatter_in_place(at: At) -> None:
    before = [at.values(at.rank, lane=owner) for owner in at.ranks]
    after = list(before)
    after[at.rank] = at.reduced(lambda rank: at.values(rank, lane=at.rank))
    stack = at.shaped(_behind_one_another(before), _behind_one_another(after), at.size, at.cell.count)
    at.call(at.api.reduce_scatter_single, stack[at.rank], stack, op=at.op)


def _all_to_all(at: At) -> None:
    inputs = [at.given(at.values(at.rank, lane=rank)) for rank in at.ranks]
    at.call(at.api.all_to_all, [at.wanted(at.values(rank, lane=at.rank)) for rank in at.ranks], inputs)


def _all_to_all_uneven(at: At) -> None:
    inputs = [at.given(at.values(at.rank, _pair(at, at.rank, rank), rank)) for rank in at.ranks]
    outputs = [at.wanted(at.values(rank, _pair(at, rank, at.rank), at.rank)) for rank in at.ranks]
    at.call(at.api.all_to_all, outputs, inputs)


def _all_to_all_single(at: At) -> None:
    incoming = _behind_one_another(at.values(at.rank, lane=rank) for rank in at.ranks)
    outgoing = _behind_one_another(at.values(rank, lane=at.rank) for rank in at.ranks)
    at.call(at.api.all_to_all_single, at.wanted(outgoing, flat=True), at.given(incoming, flat=True))


def _all_to_all_single_uneven(at: At) -> None:
    sent = [_pair(at, at.rank, rank) for rank in at.ranks]
    came = [_pair(at, rank, at.rank) for rank in at.ranks]
    incoming = _behind_one_another(at.values(at.rank, count, rank) for rank, count in enumerate(sent))
    outgoing = _behind_one_another(at.values(rank, count, at.rank) for rank, count in enumerate(came))
    at.call(at.api.all_to_all_single, at.wanted(outgoing, flat=True), at.given(incoming, flat=True), came, sent)


def _all_to_all_single_of_rows(at: At) -> None:
    width = 3
    sent = [_pair(at, at.rank, rank) for rank in at.ranks]
    came = [_pair(at, rank, at.rank) for rank in at.ranks]
    incoming = _behind_one_another(at.values(at.rank, count * width, rank) for rank, count in enumerate(sent))
    outgoing = _behind_one_another(at.values(rank, count * width, at.rank) for rank, count in enumerate(came))
    output = at.shaped(np.zeros_like(outgoing), outgoing, sum(came), width, order="F")
    at.call(at.api.all_to_all_single, output, at.shaped(incoming, incoming, sum(sent), width, order="F"), came, sent)


def _all_reduce_coalesced(at: At) -> None:
    lengths = [_uneven(at, lane) for lane in range(3)]
    arrays = [
        at.becomes(at.values(at.rank, n, lane), at.reduced(functools.partial(at.values, count=n, lane=lane)))
        for lane, n in enumerate(lengths)
    ]
    at.call(at.api.all_reduce_coalesced, arrays, at.op)


def _batch(at: At) -> None:
    """Reductions that can be made as one, one apart from them, and other collectives in between."""
    first, second, third = (
        at.becomes(at.values(at.rank, lane=lane), at.reduced(functools.partial(at.values, lane=lane)))
        for lane in range(3)
    )
    copied = at.becomes(at.values(at.rank, lane=3), at.values(at.cell.root, lane=3))
    gathered = [at.wanted(at.values(rank, lane=4)) for rank in at.ranks]
    mine = at.given(at.values(at.rank, lane=4))

    def run(group: Any, async_op: bool) -> Any:
        with at.api.batch(group, async_op) as made:
            at.api.all_reduce(first, at.op, group)
            at.api.all_reduce(second, at.op, group)
            at.api.broadcast(copied, group=group, **at.root_as("src"))
            at.api.all_reduce(third, at.op, group)
            at.api.all_gather(gathered, mine, group)
        return made if async_op else None

    at.call(run)


def _messages(at: At) -> None:
    """Round the ring: two messages to the right, which the right one takes in the other order."""
    right, left = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    sent = [at.given(at.values(at.rank, lane=lane)) for lane in range(2)]
    came = [at.wanted(at.values(left, lane=lane)) for lane in range(2)]
    to, source = at.numbers[right], at.numbers[left]
    if at.cell.async_op:
        sends = [at.api.isend(sent[lane], to, at.group, tag=lane) for lane in range(2)]
        receives = [at.api.irecv(came[lane], source if lane else None, at.group, tag=lane) for lane in (1, 0)]
        for work in (*receives, *sends):
            assert work.wait()
            assert work.is_completed()
        assert [work.source_rank() for work in receives] == [source] * 2
        return

    def send() -> None:
        for lane in range(2):
            at.api.send(sent[lane], group=at.group, tag=-lane, group_dst=right)

    def receive() -> None:
        for lane in range(2):
            assert at.api.recv(came[lane], None if lane else source, at.group, tag=-lane) == source

    for step in (send, receive) if at.rank % 2 else (receive, send):
        step()


def _batched_messages(at: At) -> None:
    """With both neighbours at once, who are the same rank among two."""
    right, left = at.numbers[(at.rank + 1) % at.size], at.numbers[(at.rank - 1) % at.size]
    works = at.api.batch_isend_irecv(
        [
            at.api.P2POp(at.api.isend, at.given(at.values(at.rank, lane=0)), right, at.group),
            at.api.P2POp(at.api.irecv, at.wanted(at.values((at.rank - 1) % at.size, lane=0)), left, at.group),
            at.api.P2POp(at.api.isend, at.given(at.values(at.rank, lane=1)), left, at.group, tag=1),
            at.api.P2POp(at.api.irecv, at.wanted(at.values((at.rank + 1) % at.size, lane=1)), right, at.group, tag=1),
        ]
    )
    at.wait(works)


def _messages_in_order(at: At) -> None:
    """Round the ring, as where there are no tags, and every receive names its source: two, in the same order."""
    right, left = at.numbers[(at.rank + 1) % at.size], at.numbers[(at.rank - 1) % at.size]
    sent = [at.given(at.values(at.rank, lane=lane)) for lane in range(2)]
    came = [at.wanted(at.values((at.rank - 1) % at.size, lane=lane)) for lane in range(2)]

    def send() -> None:
        for each in sent:
            if at.cell.async_op:
                at.wait([at.api.isend(each, right, at.group)])
            else:
                at.api.send(each, right, at.group)

    def receive() -> None:
        if at.cell.async_op:
            at.wait([at.api.irecv(each, left, at.group) for each in came])
            return
        for each in came:
            assert at.api.recv(each, left, at.group) == left

    for step in (receive, send) if at.rank % 2 else (send, receive):
        step()


# Lists of arrays, one a device elsewhere: one, two or three arrays a rank


def _all_reduce_multigpu(at: At, k: int) -> None:
    total = at.reduction(_everything(at, k))
    tensors = [at.becomes(at.values(at.rank, lane=lane), total) for lane in range(k)]
    at.call(at.api.all_reduce_multigpu, tensors, at.op)


def _reduce_multigpu(at: At, k: int) -> None:
    total, chosen = at.reduction(_everything(at, k)), k - 1
    mine = [at.values(at.rank, lane=lane) for lane in range(k)]
    tensors = [at.becomes(array, total if at.is_root and lane == chosen else array) for lane, array in enumerate(mine)]
    at.call(at.api.reduce_multigpu, tensors, at.numbers[at.cell.root], at.op, dst_tensor=chosen)


def _reduce_scatter_multigpu(at: At, k: int) -> None:
    """Output j of rank r gets the reduction of array r * k + j of all lists of all ranks, in the order of these."""

    def value(rank: int, number: int, of: int) -> Array:
        return at.values(rank, lane=number * at.size * k + of)

    outputs = [
        at.wanted(at.reduction([(rank, value(rank, i, at.rank * k + j)) for rank in at.ranks for i in range(k)]))
        for j in range(k)
    ]
    inputs = [[at.given(value(at.rank, i, of)) for of in range(at.size * k)] for i in range(k)]
    at.call(at.api.reduce_scatter_multigpu, outputs, inputs, at.op)


def _broadcast_multigpu(at: At, k: int) -> None:
    root, chosen = at.cell.root, k - 1
    tensors = [at.becomes(at.values(at.rank, lane=lane), at.values(root, lane=chosen)) for lane in range(k)]
    at.call(at.api.broadcast_multigpu, tensors, at.numbers[root], src_tensor=chosen)


def _all_gather_multigpu(at: At, k: int) -> None:
    outputs = [[at.wanted(array) for _, array in _everything(at, k)] for _ in range(k)]
    at.call(at.api.all_gather_multigpu, outputs, [at.given(at.values(at.rank, lane=lane)) for lane in range(k)])


def _everything(at: At, k: int) -> list[tuple[int, Array]]:
    """Return all arrays of all ranks, each with its rank."""
    return [(rank, at.values(rank, lane=lane)) for rank in at.ranks for lane in range(k)]


def _of_each_length(*functions: Callable[..., None]) -> dict[str, Callable[[At], None]]:
    return {
        f"{function.__name__.strip('_')} of {k}": functools.partial(function, k=k)
        for function, k in itertools.product(functions, (1, 2, 3))
    }


def _uneven(at: At, rank: int) -> int:
    """Return a length of its own for a rank: about the same, one of them long, or the first one none."""
    count = at.cell.count
    return (count + (2 * rank + 1) % 3, count if rank == 1 else count // 7, count * (rank > 0))[at.cell.root % 3]


def _pair(at: At, sender: int, receiver: int) -> int:
    """Return a length of its own for a pair of ranks: about the same, all different, or none but for one pair."""
    count = at.cell.count
    every = (
        count + (2 * sender + receiver) % 3,
        count // (1 + sender + receiver),
        count * ((sender, receiver) == (1, 0)),
    )
    return every[at.cell.root % 3]


def _behind_one_another(arrays: Any) -> Array:
    return np.concatenate(list(arrays))


def _named(*functions: Callable[[At], None]) -> dict[str, Callable[[At], None]]:
    return {function.__name__.strip("_"): function for function in functions}


REDUCING = _named(
    _all_reduce, _reduce, _reduce_scatter, _reduce_scatter_uneven, _reduce_scatter_tensor, _reduce_scatter_in_place,
    _all_reduce_coalesced, _batch,
)  # fmt: skip
MOVING = _named(
    _broadcast, _all_gather, _all_gather_uneven, _all_gather_coalesced, _all_gather_into_tensor,
    _all_gather_single_stacked, _all_gather_in_place, _gather, _gather_single, _gather_uneven, _scatter,
    _scatter_uneven, _all_to_all, _all_to_all_uneven,
    _all_to_all_single, _all_to_all_single_uneven, _all_to_all_single_of_rows,
)  # fmt: skip
MESSAGES = _named(_messages, _batched_messages)
ORDERED = _named(_messages_in_order, _batched_messages)
"""Messages as NCCL has them, too: without tags."""
REDUCING_LISTS = _of_each_length(_all_reduce_multigpu, _reduce_multigpu, _reduce_scatter_multigpu)
MOVING_LISTS = _of_each_length(_broadcast_multigpu, _all_gather_multigpu)
CALLS = REDUCING | MOVING | MESSAGES | ORDERED | REDUCING_LISTS | MOVING_LISTS
