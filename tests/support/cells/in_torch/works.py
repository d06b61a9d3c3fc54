"""Works and futures, as torch hands them on."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from support.processes import wait_until
from support.sides import Cells

cell = Cells(in_groups=True)

OVER = ("over",)
SEVERAL = (2, 3)
PATIENCE = 30.0


def ones(rank: int = 0) -> torch.Tensor:
    return torch.full((2,), rank + 1.0)


@cell()
def callbacks(group: Any, rank: int, size: int) -> Any:
    """One by add_done_callback, three chained, and one on what is complete."""
    called = threading.Event()
    future = c10d.all_reduce(ones(rank), group=group, async_op=True).get_future()
    future.add_done_callback(lambda done: called.set())
    chain = future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() + 1)
    last = chain.then(lambda done: done.value().tolist())
    return last.wait(), called.wait(PATIENCE), last.then(lambda done: len(done.value())).wait()


@cell()
def a_callback_that_raises(group: Any, rank: int, size: int) -> Any:
    def fail(done: Any) -> None:
        raise KeyError("on purpose")

    future = c10d.all_reduce(ones(rank), group=group, async_op=True).get_future().then(fail)
    with pytest.raises(Exception, match="on purpose") as caught:
        future.wait()
    return caught.type.__name__


@cell()
def a_callback_that_makes_a_call(group: Any, rank: int, size: int) -> Any:
    """It begins another call, and gives its future, whose value is taken on: DDP's hooks do."""

    def again(done: Any) -> Any:
        tensor = done.value()[0]
        return c10d.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]

    future = c10d.all_reduce(ones(rank), group=group, async_op=True).get_future()
    return future.then(again).wait()


@cell(sides=OVER)
def callbacks_that_wait_for_later_calls(group: Any, rank: int, size: int) -> Any:
    """Each waits for the future of the call after it."""
    tensors = [ones(rank) for _ in range(8)]
    futures = [c10d.all_reduce(tensor, group=group, async_op=True).get_future() for tensor in tensors]
    chained = [
        future.then(lambda done, later=later: done.value()[0] + later.wait()[0])
        for future, later in itertools.pairwise(futures)
    ]
    total = 2.0 * sum(range(1, size + 1))
    assert [future.wait().tolist() for future in chained] == [[total] * 2] * 7


@cell(sides=OVER)
def a_future_of_many(group: Any, rank: int, size: int) -> Any:
    futures = [c10d.all_reduce(ones(rank), group=group, async_op=True).get_future() for _ in range(5)]
    together = torch.futures.collect_all(futures).wait()
    total = sum(range(1, size + 1))
    assert [future.value()[0].tolist() for future in together] == [[total] * 2] * 5
    assert [value[0].tolist() for value in torch.futures.wait_all(futures)] == [[total] * 2] * 5


@cell(sides=OVER, sizes=SEVERAL)
def futures_of_messages(group: Any, rank: int, size: int) -> Any:
    """gloo has none."""
    got = torch.zeros(2)
    works = [
        c10d.irecv(got, group=group, group_src=(rank - 1) % size),
        c10d.isend(ones(rank), group=group, group_dst=(rank + 1) % size),
    ]
    values = [work.get_future().wait() for work in works]
    assert values[0][0] is got or values[0][0].data_ptr() == got.data_ptr()
    assert got.tolist() == ones((rank - 1) % size).tolist()
    assert all(work.is_completed() and work.is_success() and work.wait() for work in works)
    assert works[0].source_rank() == works[0]._source_rank() == (rank - 1) % size


@cell(sides=OVER, sizes=SEVERAL)
def a_work_that_takes_time(group: Any, rank: int, size: int) -> Any:
    """A wait that ends before the call raises, and the call goes on."""
    if rank:
        c10d.recv(torch.zeros(1), group=group, group_src=0)
    work = c10d.all_reduce(tensor := ones(rank), group=group, async_op=True)
    future = work.get_future()
    if rank == 0:
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        assert not future.done()
        with pytest.raises(c10d.DistBackendError) as caught:
            work.wait(timedelta(milliseconds=50))
        assert isinstance(caught.value, TimeoutError)
        for other in range(1, size):
            c10d.send(torch.zeros(1), group=group, group_dst=other)
    assert work.wait(timedelta(seconds=PATIENCE))
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert future.wait()[0].tolist() == tensor.tolist() == [sum(range(1, size + 1))] * 2
    with pytest.raises(RuntimeError, match="only known for a receive"):
        work.source_rank()


@cell(sides=OVER, sizes=SEVERAL)
def an_error_of_a_work(group: Any, rank: int, size: int) -> Any:
    """Everybody who asks gets it: the Work, its future, and what follows that; and the group goes on."""
    work = c10d.all_reduce(torch.ones(2 + rank % 2), group=group, async_op=True)
    followed = work.get_future().then(lambda done: done.value())
    for wait in (work.wait, work.get_future().wait, followed.wait, work.result):
        with pytest.raises(RuntimeError, match=r"rank 1: all_reduce\(float32\[3\], SUM\)"):
            wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), c10d.DistBackendError)
    c10d.all_reduce(tensor := torch.ones(2), group=group)
    assert tensor.tolist() == [size] * 2


@cell(sides=OVER)
def nothing_is_kept(group: Any, rank: int, size: int) -> Any:
    """Once a call is over, its tensors go with who has them."""
    tensor = ones(rank)
    gone = weakref.ref(tensor)
    work = c10d.all_reduce(tensor, group=group, async_op=True)
    work.get_future().then(lambda done: None).wait()
    c10d.all_reduce(tensor, group=group)
    del tensor, work
    c10d.barrier(group)
    gc.collect()
    wait_until(lambda: gone() is None, "its tensors to go: a thread may still be leaving the call")
