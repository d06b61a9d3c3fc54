"""The methods of a process group, under old and new names, and the calls that torch makes of several of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
import torch.distributed.distributed_c10d as options

from support.sides import Cells

cell = Cells(in_groups=True)

OVER = ("over",)
SEVERAL = (2, 3)
OPS = c10d.ReduceOp
LONG = timedelta(seconds=20)


def row(rank: int, count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + 10 * rank).to(dtype)


# Forms


@cell()
def methods_with_options(group: Any, rank: int, size: int) -> Any:
    opts = options.AllreduceOptions()
    opts.reduceOp = OPS.MAX
    tensor = row(rank)
    group.allreduce([tensor], opts).wait()
    gathered = [torch.zeros(4) for _ in range(size)]
    group.allgather([gathered], [tensor], options.AllgatherOptions()).wait()
    coalesced = [row(rank), row(rank, 2)]
    group.allreduce_coalesced(coalesced, options.AllreduceCoalescedOptions()).wait()
    return tensor, gathered, coalesced


@cell(sides=OVER, method=["gather_single", "gather_into_tensor"])
def gather_into_one_tensor(group: Any, rank: int, size: int, method: str) -> Any:
    """Torch 2.14's; gloo refuses it there, too."""
    opts = options.GatherOptions()
    opts.rootRank = size - 1
    output = torch.zeros(size, 4) if rank == size - 1 else torch.zeros(0)
    getattr(group, method)(output, row(rank), opts).wait()
    assert rank != size - 1 or output.equal(torch.stack([row(each) for each in range(size)]))


@cell()
def the_short_forms(group: Any, rank: int, size: int) -> Any:
    """A tensor instead of a list; root, operation and timeout, by position or name."""
    last = size - 1
    greatest, least, sent, named, summed = row(rank), row(rank), row(rank), row(rank), row(rank)
    group.allreduce(greatest, OPS.MAX).wait()
    group.allreduce([least], op=OPS.MIN).wait()
    group.allreduce(summed).wait()
    group.broadcast(sent, last).wait()
    group.broadcast(named, root=last, timeout=LONG).wait()
    at_root, multiplied = row(rank), row(rank)
    group.reduce(at_root, last).wait()
    group.reduce(multiplied, root=last, op=OPS.PRODUCT, timeout=LONG).wait()
    gathered = [torch.zeros(4) for _ in range(size)]
    group.allgather(gathered, row(rank)).wait()
    group.barrier(LONG).wait()
    group.barrier().wait()
    return greatest, least, summed, sent, named, (at_root, multiplied) if rank == last else None, gathered


@cell()
def the_short_forms_of_lists(group: Any, rank: int, size: int) -> Any:
    last = size - 1
    gathered = [torch.zeros(4) for _ in range(size)] if rank == last else []
    group.gather(gathered, row(rank), last).wait()
    scattered, reduced = torch.zeros(4), torch.zeros(4)
    group.scatter(scattered, [row(each) for each in range(size)] if rank == last else [], last, timeout=LONG).wait()
    group.reduce_scatter(reduced, [row(rank + part) for part in range(size)], OPS.MAX).wait()
    swapped = torch.zeros(2 * size)
    group.all_to_all_single(swapped, row(rank, 2 * size), [], [], timeout=LONG).wait()
    lists = [torch.zeros(4) for _ in range(size)]
    group.alltoall(lists, [row(rank + to) for to in range(size)]).wait()
    return gathered, scattered, reduced, swapped, lists


@cell()
def a_timeout_of_the_short_form_counts(group: Any, rank: int, size: int) -> Any:
    own = c10d.new_group(backend=group.name())
    try:
        if rank == 0 and size > 1:
            own.allreduce(row(rank), timeout=timedelta(milliseconds=200)).wait()
    except RuntimeError:
        return "late"
    return None


@cell(form=["single", "base"])
def into_one_tensor(group: Any, rank: int, size: int, form: str) -> Any:
    gather = {"single": "all_gather_single", "base": "_allgather_base"}[form]
    scatter = {"single": "reduce_scatter_single", "base": "_reduce_scatter_base"}[form]
    swap = {"single": "all_to_all_single", "base": "alltoall_base"}[form]
    whole, part, swapped = torch.zeros(4 * size), torch.zeros(4), torch.zeros(2 * size)
    getattr(group, gather)(whole, row(rank)).wait()
    getattr(group, scatter)(part, row(rank, 4 * size)).wait()
    getattr(group, swap)(swapped, row(rank, 2 * size), [], []).wait()
    uneven = torch.zeros(size * (rank + 1))
    sends = [each + 1 for each in range(size)]
    getattr(group, swap)(uneven, row(rank, sum(sends)), [rank + 1] * size, sends).wait()
    return whole, part, swapped, uneven


@cell(form=["single", "tensor"])
def into_one_tensor_together(group: Any, rank: int, size: int, form: str) -> Any:
    gather = {"single": "all_gather_single_coalesced", "tensor": "allgather_into_tensor_coalesced"}[form]
    scatter = {"single": "reduce_scatter_single_coalesced", "tensor": "reduce_scatter_tensor_coalesced"}[form]
    wholes, parts = [torch.zeros(4 * size), torch.zeros(2 * size)], [torch.zeros(4), torch.zeros(2)]
    getattr(group, gather)(wholes, [row(rank), row(rank, 2)]).wait()
    getattr(group, scatter)(parts, [row(rank, 4 * size), row(rank, 2 * size)]).wait()
    return wholes, parts


@cell(sides=OVER)
def uneven_sizes_together(group: Any, rank: int, size: int) -> Any:
    outputs = [[torch.zeros(each + 1), torch.zeros(2)] for each in range(size)]
    work = group.allgather_coalesced(outputs, [row(rank, rank + 1), row(rank, 2)])
    work.wait()
    for each, (first, second) in enumerate(outputs):
        assert first.tolist() == row(each, each + 1).tolist()
        assert second.tolist() == row(each, 2).tolist()
    assert work.result() == [tensor for tensors in outputs for tensor in tensors]


# Dtypes


@cell(sides=OVER, dtype=["float8_e5m2", "uint64", "complex32", "bool"])
def every_bit_is_moved(group: Any, rank: int, size: int, dtype: str) -> Any:
    kind = getattr(torch, dtype)
    count = 2 if kind is torch.bool else 256

    def mine(rank: int) -> torch.Tensor:
        return ((torch.arange(count * kind.itemsize) + rank) % count).to(torch.uint8).view(kind)

    gathered = [torch.zeros_like(mine(0)) for _ in range(size)]
    c10d.all_gather(gathered, mine(rank), group=group)
    for each, tensor in enumerate(gathered):
        assert tensor.view(torch.uint8).equal(mine(each).view(torch.uint8)), each


@cell(sides=OVER, dtype=["float16", "bfloat16", "float32", "complex64", "float8_e5m2"], call=["mean", "premultiplied"])
def sums_with_a_factor(group: Any, rank: int, size: int, dtype: str, call: str) -> Any:
    """By every call that reduces, also where c10d.ReduceOp has another constructor for the operation."""
    kind = getattr(torch, dtype)
    op = OPS.AVG if call == "mean" else c10d._make_nccl_premul_sum(0.5)
    total = sum(2.0 * (each + 1) for each in range(size))
    wanted = torch.tensor([total / size if call == "mean" else total / 2]).to(kind).item()
    mine = torch.full((2,), 2.0 * (rank + 1)).to(kind)
    outputs = [mine.clone() for _ in range(5)]
    c10d.all_reduce(outputs[0], op, group)
    c10d.reduce(outputs[1], 0, op, group)
    c10d.reduce_scatter(outputs[2], [mine] * size, op, group)
    c10d.reduce_scatter_tensor(outputs[3], mine.repeat(size), op, group)
    with c10d._coalescing_manager(group):
        c10d.all_reduce(outputs[4], op, group)
    for number, output in enumerate(outputs):
        if number != 1 or rank == 0:
            assert output.tolist() == [wanted, wanted], (number, output, wanted)


@cell(sides=OVER)
def a_tensor_as_factor(group: Any, rank: int, size: int) -> Any:
    tensor = torch.ones(2)
    c10d.all_reduce(tensor, c10d._make_nccl_premul_sum(torch.tensor(rank + 1.0)), group)
    assert tensor.tolist() == [sum(range(1, size + 1))] * 2


# Several at once


@cell(sides=OVER, call=["all_reduce", "all_gather", "reduce_scatter"], waits=["at once", "later"])
def coalescing_on_a_device(group: Any, rank: int, size: int, call: str, waits: str) -> Any:
    """With a device torch opens a batch of the backend, and in it makes one call of all."""
    inputs = [row(rank, (each + 1) * (size if call == "reduce_scatter" else 1)) for each in range(3)]
    outputs = [torch.zeros((each + 1) * (size if call == "all_gather" else 1)) for each in range(3)]
    with c10d._coalescing_manager(group, torch.device("cpu"), async_ops=waits == "later") as made:
        for tensor, output in zip(inputs, outputs, strict=True):
            if call == "all_reduce":
                c10d.all_reduce(tensor, group=group)
            elif call == "all_gather":
                c10d.all_gather_into_tensor(output, tensor, group)
            else:
                c10d.reduce_scatter_tensor(output, tensor, group=group)
    if waits == "later":
        made.wait()
    shift = 10 * sum(range(size))
    for each in range(3):
        count = each + 1
        if call == "all_reduce":
            assert inputs[each].tolist() == [size * element + shift for element in range(count)]
        elif call == "all_gather":
            assert outputs[each].tolist() == torch.cat([row(other, count) for other in range(size)]).tolist()
        else:
            mine = range(rank * count, (rank + 1) * count)
            assert outputs[each].tolist() == [size * element + shift for element in mine]


@cell(sides=OVER)
def coalescing_of_other_calls_on_a_device(group: Any, rank: int, size: int) -> Any:
    """Calls of which torch makes no one call, and messages."""
    sent, after, before = row(rank), (rank + 1) % size, (rank - 1) % size
    gathered, got = [torch.zeros(1) for _ in range(size)], torch.zeros(4)
    with c10d._coalescing_manager(group, torch.device("cpu")):
        c10d.broadcast(sent, size - 1, group)
        c10d.all_gather(gathered, torch.tensor([float(rank)]), group)
        if size > 1:
            c10d.isend(row(rank), group=group, group_dst=after)
            c10d.irecv(got, group=group, group_src=before)
    assert sent.tolist() == row(size - 1).tolist()
    assert [tensor.item() for tensor in gathered] == list(range(size))
    assert size == 1 or got.tolist() == row(before).tolist()
    c10d.all_reduce(sent, group=group)
    assert sent.tolist() == (size * row(size - 1)).tolist(), "the batch is over"


@cell(sides=OVER)
def an_empty_batch_on_a_device(group: Any, rank: int, size: int) -> Any:
    with c10d._coalescing_manager(group, torch.device("cpu")):
        pass
    with c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True) as made:
        pass
    made.wait()


@cell(sides=OVER, sizes=SEVERAL)
def sends_whose_works_nobody_keeps(group: Any, rank: int, size: int) -> Any:
    """They arrive, however long they are; gloo loses them."""
    if rank == 0:
        for number in range(10):
            c10d.isend(row(number, 50_000), group=group, group_dst=1)
    if rank == 1:
        for number in range(10):
            c10d.recv(got := torch.zeros(50_000), group=group, group_src=0)
            assert got.equal(row(number, 50_000))


@cell(sizes=(3,))
def a_message_from_any_rank_of_a_group(group: Any, rank: int, size: int) -> Any:
    """The Work knows the group rank, recv returns the global one."""
    pair = c10d.new_group([1, 2], backend=group.name())
    if rank == 1:
        c10d.send(row(1), group=pair, group_dst=1)
        c10d.send(row(1), 2, group=pair)
        c10d.send(row(2), 2, group=pair, tag=5)
    if rank != 2:
        return c10d.destroy_process_group(pair)
    got, works = torch.zeros(4), []
    sender = c10d.recv(got, group=pair)
    works.append(pair.recv_anysource([got], 0))
    works[0].wait()
    works.append(pair.recv([got], 0, 5))
    works[1].wait()
    told = sender, [work._source_rank() for work in works], got
    c10d.destroy_process_group(pair)
    return told


# Kinds of tensors


@cell(sides=OVER)
def leaves_that_require_a_gradient(group: Any, rank: int, size: int) -> Any:
    """Every call that writes may write into one."""
    for call in (
        lambda leaf: c10d.all_reduce(leaf, group=group),
        lambda leaf: c10d.broadcast(leaf, group=group, group_src=0),
        lambda leaf: c10d.all_gather(list(leaf.unbind()) if size == 1 else [torch.zeros(3)] * size, leaf[0], group),
        lambda leaf: c10d.all_to_all_single(leaf.view(-1)[:0], leaf.view(-1)[:0], group=group),
        lambda leaf: c10d.reduce(leaf, 0, group=group),
        lambda leaf: c10d.all_reduce(leaf[:, 1], group=group),
        lambda leaf: c10d.all_reduce(leaf.t(), group=group),
    ):
        leaf = torch.ones(size, 3, requires_grad=True)
        call(leaf)
        assert leaf.requires_grad
        assert leaf.is_leaf
        leaf.sum().backward()
        assert leaf.grad.tolist() == torch.ones(size, 3).tolist()


@cell(async_op=[False, True])
def memory_that_is_given_back_later(group: Any, rank: int, size: int, async_op: bool) -> Any:
    """FSDP frees and gets again the memory of what it gathers into: no call holds on to it."""
    whole, mine = torch.zeros(4 * size), row(rank)
    results = []
    for _ in range(2):
        work = c10d.all_gather_into_tensor(whole, mine, group, async_op)
        if async_op:
            work.wait()
        results.append(whole.clone())
        for tensor in (whole, mine):
            storage = tensor.untyped_storage()
            count = storage.nbytes()
            storage.resize_(0)
            storage.resize_(count)
            tensor.fill_(rank)
    return results


@cell()
def layouts_of_outputs(group: Any, rank: int, size: int) -> Any:
    """What a call fills may lie anyhow in memory; what is around it stays. gloo takes views in lists alone."""
    around = torch.zeros(size, 4, 3)
    c10d.all_gather([around[each, :, 1] for each in range(size)], row(rank), group)
    return around


# Tensors


@cell(sizes=SEVERAL)
def versions_of_tensors_that_calls_overwrite(group: Any, rank: int, size: int) -> Any:
    """Autograd compares them: it refuses a backward pass for which an overwritten tensor was saved."""
    ones, lists = torch.ones(2), [torch.ones(2) for _ in range(size)]
    written: dict[str, list[torch.Tensor]] = {
        name: [torch.ones(2) for _ in range(size)] for name in ("all_gather", "gather", "all_to_all", "coalesced")
    }
    whole, part, sum_of_whole = torch.ones(2 * size), torch.ones(2), torch.ones(2)
    c10d.all_gather(written["all_gather"], ones, group)
    c10d.gather(ones, written["gather"] if rank == 0 else None, group=group, group_dst=0)
    c10d.all_to_all(written["all_to_all"], lists, group)
    group.allreduce_coalesced(written["coalesced"], options.AllreduceCoalescedOptions()).wait()
    c10d.all_gather_single(whole, ones, group)
    c10d.reduce_scatter(part, lists, group=group)
    c10d.reduce_scatter_single(sum_of_whole, torch.ones(2 * size), group=group)
    c10d.all_reduce(ones, group=group)
    tensors = [*lists, *(each for many in written.values() for each in many), whole, part, sum_of_whole, ones]
    return [tensor._version > 0 for tensor in tensors]


@cell()
def meta_tensors(group: Any, rank: int, size: int) -> Any:
    """They have no data, and a call does nothing."""
    one, all_of_them = torch.ones(2, device="meta"), torch.ones(2 * size, device="meta")
    c10d.all_reduce(one, group=group)
    c10d.broadcast(one, group=group, group_src=0)
    c10d.all_gather_single(all_of_them, one, group)
    c10d.reduce_scatter_single(one, all_of_them, group=group)
    c10d.all_to_all_single(all_of_them, all_of_them, group=group)
    return c10d.all_reduce(one, group=group, async_op=True).wait()
