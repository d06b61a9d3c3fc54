"""Short synchronous calls of torch's, which the compiled core carries out with few Python calls on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as c10d
from support.processes import Me, on_ranks

from rankmesh_agent import native

_MOST = 10
"""Python calls of the SDK's for each of torch's; those of the agent's, on a busy host, are beside the core."""


def calls_of_the_sdk(function: Callable[[], object]) -> list[str]:
    names = []

    def enter(frame, event, _):
        if event == "call" and frame.f_globals["__name__"].startswith("rankmesh."):
            names.append(frame.f_code.co_name)

    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.skipif(native.core is None, reason="the compiled core does not run")
@on_ranks(2)
def test_few_calls_and_the_same_results(me: Me) -> None:
    c10d.init_process_group("rankmesh", init_method=f"file://{me.folder}/met", rank=me.rank, world_size=2)
    mine = torch.arange(6.0).reshape(2, 3) + 10 * me.rank
    both = torch.stack([torch.arange(6.0), torch.arange(6.0) + 10])
    whole, part = torch.empty(12), torch.empty(3)

    def newest(name: str, before: str) -> Callable[..., object]:  # the older names warn
        return getattr(c10d, name, None) or getattr(c10d, before)

    gather = newest("all_gather_single", "all_gather_into_tensor")
    scatter = newest("reduce_scatter_single", "reduce_scatter_tensor")

    def exchange() -> None:
        if me.rank == 0:
            c10d.send(mine, 1, tag=3)
        else:
            c10d.recv(whole[:6], 0, tag=3)

    results = {  # of each call: what it writes to, and what it leaves there
        lambda: c10d.all_reduce(summed): lambda: (summed.flatten(), both.sum(0)),
        lambda: c10d.broadcast(summed, 1): lambda: (summed.flatten(), both[1]),
        lambda: c10d.reduce(summed, 0, c10d.ReduceOp.MAX): lambda: (summed.flatten(), both[1]),
        lambda: gather(whole, mine): lambda: (whole, both.flatten()),
        lambda: scatter(part, mine.flatten()): lambda: (part, both.sum(0).split(3)[me.rank]),
        exchange: lambda: (whole[:6], both[0]) if me.rank else (mine.flatten(), both[0]),
    }
    for call, result in results.items():
        for _ in range(3):
            summed = torch.nn.Parameter(mine.clone(), requires_grad=False)
            whole.zero_()
            c10d.barrier()
            names = calls_of_the_sdk(call)
            torch.testing.assert_close(*result(), rtol=0, atol=0)
        if call is not exchange or me.rank == 0:  # a receive that comes first waits in Python
            assert len(names) <= _MOST, names

    # Tensors that are not an array as they are: views with steps, negated ones, and those without memory.
    strided, shifted = torch.ones(4, 2)[:, 1], torch.arange(8.0)[3:6]
    number = torch.tensor([1 + 2j]).conj().imag
    empty = torch.empty(0)
    for tensor in (strided, shifted, number, empty):
        c10d.all_reduce(tensor)
    assert (strided.tolist(), shifted.tolist(), number.item()) == ([2] * 4, [6, 8, 10], -4)
    work = c10d.group.WORLD.send([mine], 1) if me.rank == 0 else c10d.group.WORLD.recv([mine], 0)
    assert (work.wait(), work.is_completed(), work.result()[0] is mine) == (True, True, True)
    assert me.rank == 0 or work.source_rank() == 0

    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        c10d.all_reduce(freed)
