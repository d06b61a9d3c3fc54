"""The calls of the matrix: what a rank passes to a function, and what it must find in its arrays afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rankmesh as dist
from support.matrix.cell import At
from support.matrix.containers import Array


def _all_reduce(at: At) -> None:
    at.call(dist.all_reduce, at.becomes(at.values(at.rank), at.reduced(at.values)), op=at.op)


def _reduce(at: At) -> None:
    mine = at.values(at.rank)
    at.call(dist.reduce, at.becomes(mine, at.reduced(at.values) if at.is_root else mine), op=at.op, **at.root_as("dst"))


def _broadcast(at: At) -> None:
    at.call(dist.broadcast, at.becomes(at.values(at.rank), at.values(at.cell.root)), **at.root_as("src"))


def _all_gather(at: At) -> None:
    outputs = [at.wanted(at.values(rank)) for rank in at.ranks]
    at.call(dist.all_gather, outputs, at.given(at.values(at.rank)))


def _all_gather_uneven(at: At) -> None:
    outputs = [at.wanted(at.values(rank, _uneven(at, rank))) for rank in at.ranks]
    at.call(dist.all_gather_v, outputs, at.given(at.values(at.rank, _uneven(at, at.rank))))


def _all_gather_coalesced(at: At) -> None:
    outputs = [[at.wanted(at.values(rank, lane=lane)) for lane in range(2)] for rank in at.ranks]
    at.call(dist.all_gather_coalesced, outputs, [at.given(at.values(at.rank, lane=lane)) for lane in range(2)])


def _all_gather_into_tensor(at: At) -> None:
    everyone = _behind_one_another(at.values(rank) for rank in at.ranks)
    at.call(dist.all_gather_into_tensor, at.wanted(everyone), at.given(at.values(at.rank)))


def _all_gather_single_stacked(at: At) -> None:
    everyone = _behind_one_another(at.values(rank) for rank in at.ranks)
    stack = at.shaped(np.zeros_like(everyone), everyone, at.size, at.cell.count)
    at.call(dist.all_gather_single, stack, at.given(at.values(at.rank)))


def _all_gather_in_place(at: At) -> None:
    everyone = _behind_one_another(at.values(rank) for rank in at.ranks)
    before = np.ones_like(everyone).reshape(at.size, at.cell.count)
    before[at.rank] = at.values(at.rank)
    output = at.shaped(before, everyone, at.size, at.cell.count)
    at.call(dist.all_gather_into_tensor, output, output[at.rank])


def _gather(at: At) -> None:
    outputs = [at.wanted(at.values(rank)) for rank in at.ranks] if at.is_root else None
    at.call(dist.gather, at.given(at.values(at.rank)), outputs, **at.root_as("dst"))


def _scatter(at: At) -> None:
    inputs = [at.given(at.values(at.rank, lane=rank)) for rank in at.ranks] if at.is_root else []
    at.call(dist.scatter, at.wanted(at.values(at.cell.root, lane=at.rank)), inputs, **at.root_as("src"))


def _reduce_scatter(at: At) -> None:
    inputs = [at.given(at.values(at.rank, lane=owner)) for owner in at.ranks]
    output = at.wanted(at.reduced(lambda rank: at.values(rank, lane=at.rank)))
    at.call(dist.reduce_scatter, output, inputs, op=at.op)


def _reduce_scatter_uneven(at: At) -> None:
    inputs = [at.given(at.values(at.rank, _uneven(at, owner), owner)) for owner in at.ranks]
    output = at.wanted(at.reduced(lambda rank: at.values(rank, _uneven(at, at.rank), at.rank)))
    at.call(dist.reduce_scatter_v, output, inputs, op=at.op)


def _reduce_scatter_tensor(at: At) -> None:
    everyone = _behind_one_another(at.values(at.rank, lane=owner) for owner in at.ranks)
    output = at.wanted(at.reduced(lambda rank: at.values(rank, lane=at.rank)))
    at.call(dist.reduce_scatter_tensor, output, at.given(everyone), op=at.op)


def _reduce_scatter_in_place(at: At) -> None:
    before = [at.values(at.rank, lane=owner) for owner in at.ranks]
    after = list(before)
    after[at.rank] = at.reduced(lambda rank: at.values(rank, lane=at.rank))
    stack = at.shaped(_behind_one_another(before), _behind_one_another(after), at.size, at.cell.count)
    at.call(dist.reduce_scatter_single, stack[at.rank], stack, op=at.op)


def _all_to_all(at: At) -> None:
    inputs = [at.given(at.values(at.rank, lane=rank)) for rank in at.ranks]
    at.call(dist.all_to_all, [at.wanted(at.values(rank, lane=at.rank)) for rank in at.ranks], inputs)


def _all_to_all_uneven(at: At) -> None:
    inputs = [at.given(at.values(at.rank, _pair(at, at.rank, rank), rank)) for rank in at.ranks]
    outputs = [at.wanted(at.values(rank, _pair(at, rank, at.rank), at.rank)) for rank in at.ranks]
    at.call(dist.all_to_all, outputs, inputs)


def _all_to_all_single(at: At) -> None:
    incoming = _behind_one_another(at.values(at.rank, lane=rank) for rank in at.ranks)
    outgoing = _behind_one_another(at.values(rank, lane=at.rank) for rank in at.ranks)
    at.call(dist.all_to_all_single, at.wanted(outgoing, flat=True), at.given(incoming, flat=True))


def _all_to_all_single_uneven(at: At) -> None:
    sent = [_pair(at, at.rank, rank) for rank in at.ranks]
    came = [_pair(at, rank, at.rank) for rank in at.ranks]
    incoming = _behind_one_another(at.values(at.rank, count, rank) for rank, count in enumerate(sent))
    outgoing = _behind_one_another(at.values(rank, count, at.rank) for rank, count in enumerate(came))
    at.call(dist.all_to_all_single, at.wanted(outgoing, flat=True), at.given(incoming, flat=True), came, sent)


def _all_to_all_single_of_rows(at: At) -> None:
    width = 3
    sent = [_pair(at, at.rank, rank) for rank in at.ranks]
    came = [_pair(at, rank, at.rank) for rank in at.ranks]
    incoming = _behind_one_another(at.values(at.rank, count * width, rank) for rank, count in enumerate(sent))
    outgoing = _behind_one_another(at.values(rank, count * width, at.rank) for rank, count in enumerate(came))
    output = at.shaped(np.zeros_like(outgoing), outgoing, sum(came), width, order="F")
    at.call(dist.all_to_all_single, output, at.shaped(incoming, incoming, sum(sent), width, order="F"), came, sent)


def _all_reduce_coalesced(at: At) -> None:
    lengths = [_uneven(at, lane) for lane in range(3)]
    arrays = [
        at.becomes(at.values(at.rank, n, lane), at.reduced(lambda rank, n=n, lane=lane: at.values(rank, n, lane)))
        for lane, n in enumerate(lengths)
    ]
    at.call(dist.all_reduce_coalesced, arrays, at.op)


def _batch(at: At) -> None:
    """Reductions that can be made as one, one apart from them, and other collectives in between."""
    first, second, third = (
        at.becomes(at.values(at.rank, lane=lane), at.reduced(lambda rank, lane=lane: at.values(rank, lane=lane)))
        for lane in range(3)
    )
    copied = at.becomes(at.values(at.rank, lane=3), at.values(at.cell.root, lane=3))
    gathered = [at.wanted(at.values(rank, lane=4)) for rank in at.ranks]
    mine = at.given(at.values(at.rank, lane=4))

    def run(group: Any, async_op: bool) -> Any:
        with dist.batch(group, async_op) as made:
            dist.all_reduce(first, at.op, group)
            dist.all_reduce(second, at.op, group)
            dist.broadcast(copied, group=group, **at.root_as("src"))
            dist.all_reduce(third, at.op, group)
            dist.all_gather(gathered, mine, group)
        return made if async_op else None

    at.call(run)


def _messages(at: At) -> None:
    """Round the ring: two messages to the right, which the right one takes in the other order."""
    right, left = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    sent = [at.given(at.values(at.rank, lane=lane)) for lane in range(2)]
    came = [at.wanted(at.values(left, lane=lane)) for lane in range(2)]
    to, source = at.numbers[right], at.numbers[left]
    if at.cell.async_op:
        sends = [dist.isend(sent[lane], to, at.group, tag=lane) for lane in range(2)]
        receives = [dist.irecv(came[lane], source if lane else None, at.group, tag=lane) for lane in (1, 0)]
        for work in (*receives, *sends):
            assert work.wait()
            assert work.is_completed()
        assert [work.source_rank() for work in receives] == [source] * 2
        return

    def send() -> None:
        for lane in range(2):
            dist.send(sent[lane], group=at.group, tag=-lane, group_dst=right)

    def receive() -> None:
        for lane in range(2):
            assert dist.recv(came[lane], None if lane else source, at.group, tag=-lane) == source

    for step in (send, receive) if at.rank % 2 else (receive, send):
        step()


def _batched_messages(at: At) -> None:
    """With both neighbours at once, who are the same rank among two."""
    right, left = at.numbers[(at.rank + 1) % at.size], at.numbers[(at.rank - 1) % at.size]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, at.given(at.values(at.rank, lane=0)), right, at.group),
            dist.P2POp(dist.irecv, at.wanted(at.values((at.rank - 1) % at.size, lane=0)), left, at.group),
            dist.P2POp(dist.isend, at.given(at.values(at.rank, lane=1)), left, at.group, tag=1),
            dist.P2POp(dist.irecv, at.wanted(at.values((at.rank + 1) % at.size, lane=1)), right, at.group, tag=1),
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
                at.wait([dist.isend(each, right, at.group)])
            else:
                dist.send(each, right, at.group)

    def receive() -> None:
        if at.cell.async_op:
            at.wait([dist.irecv(each, left, at.group) for each in came])
            return
        for each in came:
            assert dist.recv(each, left, at.group) == left

    for step in (receive, send) if at.rank % 2 else (send, receive):
        step()


def _uneven(at: At, rank: int) -> int:
    return at.cell.count + (2 * rank + 1) % 3


def _pair(at: At, sender: int, receiver: int) -> int:
    return at.cell.count + (2 * sender + receiver) % 3


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
    _all_gather_single_stacked, _all_gather_in_place, _gather, _scatter, _all_to_all, _all_to_all_uneven,
    _all_to_all_single, _all_to_all_single_uneven, _all_to_all_single_of_rows,
)  # fmt: skip
MESSAGES = _named(_messages, _batched_messages)
ORDERED = _named(_messages_in_order, _batched_messages)
"""Messages as NCCL has them, too: without tags."""
VARIANTS = frozenset({"reduce_scatter_in_place", "all_reduce_coalesced"})
"""Those of REDUCING that make calls which others make too."""
CALLS = REDUCING | MOVING | MESSAGES | ORDERED
