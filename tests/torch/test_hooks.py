"""Hooks of torch 2.14: those of a group over the mesh are called as gloo's are; the check for NaN is one of them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from support.processes import Me, on_ranks
from torch._C import _distributed_c10d

pytestmark = pytest.mark.skipif(not hasattr(_distributed_c10d, "PreHookArgs"), reason="torch has hooks from 2.14 on")

ONE, TWO = torch.ones(2), torch.ones(4)


def begin(me: Me, backend: str) -> Any:
    store = c10d.FileStore(f"{me.folder}/{backend}", me.size)
    c10d.init_process_group(backend, store=store, rank=me.rank, world_size=me.size, timeout=timedelta(seconds=60))
    return c10d.group.WORLD


def make_calls(group: Any, rank: int) -> None:
    pair, at_one = [ONE, ONE], [ONE, ONE] if rank == 1 else None
    c10d.broadcast(ONE, 1)
    c10d.all_reduce(ONE)
    c10d.all_reduce(torch.eye(2).to_sparse())
    c10d.all_reduce(ONE, async_op=True).wait()
    group.allreduce(ONE).wait()
    group.broadcast(ONE, 1).wait()
    c10d.reduce(ONE, 1)
    c10d.all_gather([ONE, ONE], ONE)
    c10d.all_gather_single(TWO, ONE)
    group.all_gather_single_coalesced([TWO, TWO], [ONE, ONE]).wait()
    c10d.gather(ONE, at_one, 1)
    c10d.scatter(ONE, at_one, 1)
    c10d.reduce_scatter(ONE, pair)
    c10d.reduce_scatter_single(ONE, TWO)
    group.reduce_scatter_single_coalesced([ONE, ONE], [TWO, TWO]).wait()
    c10d.all_to_all([ONE, ONE], pair)
    c10d.all_to_all_single(ONE, ONE)
    c10d.barrier()
    c10d.send(ONE, 1) if rank == 0 else c10d.recv(ONE, 0)
    c10d.send(ONE, 1) if rank == 0 else c10d.recv(ONE)
    works = c10d.batch_isend_irecv([c10d.P2POp(c10d.isend, ONE, 1 - rank), c10d.P2POp(c10d.irecv, TWO[:2], 1 - rank)])
    for work in works:
        work.wait()
    group.monitored_barrier()
    with c10d._coalescing_manager(group):
        c10d.all_reduce(ONE)
        c10d.all_reduce(TWO)
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(ONE, "sum", group.group_name))


def recorded(group: Any, rank: int) -> list[tuple[Any, ...]]:
    """Return what hooks have been called with in a number of calls."""
    found: list[tuple[Any, ...]] = []

    def before(args: Any) -> None:
        sent, received = ([tuple(each.shape) for each in found] for found in (args.input_tensors, args.output_tensors))
        found.append((args.name, args.async_op, sent, received, args.root, args.op_id))

    def after(args: Any) -> None:
        assert isinstance(args.work, c10d.Work)
        found.append((args.name, args.async_op, args.op_id))

    group.register_pre_hook(1, lambda args: pytest.fail("another one has its number"))
    group.register_pre_hook(1, before)
    group.register_post_hook(1, after)
    make_calls(group, rank)
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    group.unregister_post_hook(2)  # which is not there
    c10d.all_reduce(ONE)
    return found


@on_ranks(2)
def test_hooks_are_called_as_those_of_gloo(me: Me) -> None:
    group = begin(me, "gloo")
    gloos = recorded(group, me.rank)
    c10d.destroy_process_group()
    group = begin(me, "rankmesh")
    assert recorded(group, me.rank) == gloos
    assert {each[0].name for each in gloos} >= {"SEND", "RECV", "ALLREDUCE", "ALLTOALL", "REDUCE_SCATTER"}
    c10d.destroy_process_group()


@on_ranks(2)
def test_what_a_hook_raises_is_the_call_s_error(me: Me) -> None:
    group = begin(me, "rankmesh")
    later: list[Any] = []

    def refuse(args: Any) -> None:
        raise KeyError(args.name.name)

    group.register_pre_hook(1, refuse)
    group.register_post_hook(1, later.append)
    with pytest.raises(KeyError, match="ALLREDUCE"):
        c10d.all_reduce(ONE)
    assert not later
    group.unregister_pre_hook(1)
    total = torch.ones(1)
    c10d.all_reduce(total)
    assert total == 2
    c10d.destroy_process_group()


@on_ranks(2, env={"TORCH_DIST_NAN_CHECK": "1"})
def test_sent_nan_is_an_error(me: Me) -> None:
    group = begin(me, "rankmesh")
    bad = torch.tensor([1.0, torch.nan])
    pair = [bad, bad]
    for call in (
        lambda: c10d.all_reduce(bad),
        lambda: c10d.all_reduce(bad.to(torch.bfloat16)),
        lambda: c10d.all_reduce(bad.to_sparse()),
        lambda: c10d.reduce_scatter(ONE, pair),
        lambda: c10d.send(bad, 1 - me.rank),
    ):
        with pytest.raises(RuntimeError, match="NaN found in input tensor"):
            call()
    c10d.all_gather(pair, torch.zeros(2))  # received into
    received = torch.tensor([torch.nan])
    c10d.broadcast(torch.zeros(1) if me.rank == 0 else received, 0)
    assert torch.equal(received, torch.zeros(1)) == (me.rank == 1)
    c10d.all_reduce(torch.tensor([torch.inf]))
    check = _distributed_c10d.NanCheckHook.attach(alone := c10d.new_subgroups(1)[0])
    for _ in range(2):
        check.remove()
    with pytest.raises(RuntimeError, match="NaN found"):
        c10d.all_reduce(torch.tensor([torch.nan]), group=alone)  # the one of the environment
    assert group.supports_window is False
    c10d.destroy_process_group()


@on_ranks(2)
def test_abort_hooks_are_called_when_the_group_fails(me: Me) -> None:
    group = begin(me, "rankmesh")
    aborted, never = threading.Event(), threading.Event()
    late = c10d.new_group(timeout=timedelta(seconds=0.3))
    for each in (late, group):
        each.register_abort_hook(1, aborted.set)
        each.register_abort_hook(2, never.set)
        each.unregister_abort_hook(2)
    if me.rank == 1:
        me.wait_for("timeout")
        c10d.all_reduce(ONE, group=late)  # has what rank 0 sent before
    with pytest.raises(c10d.DistBackendError, match="the timeout is over" if me.rank == 0 else "gave up"):
        c10d.all_reduce(ONE, group=late)
    assert aborted.wait(30)
    aborted.clear()
    me.mark("timeout" if me.rank == 0 else "both")
    me.wait_for("both")
    group.abort()
    assert aborted.wait(30)
    assert not never.is_set()
    c10d.destroy_process_group()
