"""Messages of a rank to itself, as in a ring of one: the same program for NumPy arrays and torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def exchange_with_itself(dist: Any, full: Callable[[int, float], Any], group: Any = None) -> None:
    """Send messages to this rank in every way that the functions of ``dist`` have.

    Args:
        dist: rankmesh or torch.distributed.
        full: makes an array of so many elements of a value.
        group: the group.
    """
    me = dist.get_rank()

    def values(array: Any) -> set[float]:
        return set(array.tolist())

    for count in (1, 3, 500_000):
        for receives_first in (False, True):
            sent, got = full(count, 7), full(count, 0)
            ops = [dist.P2POp(dist.isend, sent, me, group), dist.P2POp(dist.irecv, got, me, group)]
            for work in dist.batch_isend_irecv(ops[::-1] if receives_first else ops):
                work.wait()
            assert values(got) == {7.0}, (count, receives_first)
            work = dist.irecv(got, me, group) if receives_first else dist.isend(full(count, 8), me, group)
            other = dist.isend(full(count, 8), me, group) if receives_first else dist.irecv(got, me, group)
            other.wait()
            work.wait()
            assert values(got) == {8.0}, (count, receives_first)
    # Messages of a tag keep their order, those of several tags need not; the source may be any.
    works = [dist.isend(full(2, value), me, group, tag) for value, tag in ((1, 5), (2, 5), (3, 6), (4, 5))]
    got = full(2, 0)
    for source, tag, expected in ((me, 6, 3), (me, 5, 1), (None, 5, 2), (None, 5, 4)):
        dist.irecv(got, source, group, tag).wait()
        assert values(got) == {float(expected)}
    for work in works:
        work.wait()
