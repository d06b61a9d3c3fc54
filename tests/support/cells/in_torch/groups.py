"""Groups of torch.distributed over the mesh: how they are made, mixed with gloo's, and what they say of themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import rankmesh.torch
from rankmesh.torch._functions import torch_group
from support.sides import Cells

cell = Cells(in_groups=True)

OVER = ("over",)
SEVERAL = (2, 3)


def total(group: Any, rank: int) -> float:
    c10d.all_reduce(tensor := torch.tensor([10.0**rank]), group=group)
    return tensor.item()


@cell(backend=["rankmesh", "gloo"], local=[False, True], sides=OVER)
def groups_beside(group: Any, rank: int, size: int, backend: str, local: bool) -> None:
    """Of the default group's backend, or of another one; made by all ranks, or by the members.

    torch gives a group that is made by its members a name with the number of groups that each is in, or, from 2.14 on,
    has made: so each rank makes one. Over the mesh groups do not need the name.
    """
    members = list(range(size - 1, size)) if size < 3 else [0, 2]
    if local and rank not in members:
        alone = c10d.new_group([rank], backend=backend, use_local_synchronization=True)
        c10d.destroy_process_group(alone)
        return
    made = c10d.new_group(members, backend=backend, use_local_synchronization=local, group_desc="beside")
    if rank not in members:
        assert made is c10d.GroupMember.NON_GROUP_MEMBER
        return
    assert c10d.get_backend(made) == backend
    assert c10d.get_process_group_ranks(made) == members
    assert made.group_desc == "beside"
    assert total(made, rank) == sum(10.0**each for each in members)
    c10d.destroy_process_group(made)


@cell(sides=OVER)
def groups_of_groups(group: Any, rank: int, size: int) -> Any:
    """Many, each of which goes on while others end."""
    groups = [c10d.new_group() for _ in range(4)]
    everybody = sum(10.0**each for each in range(size))
    assert [total(each, rank) for each in groups] == [everybody] * 4
    c10d.destroy_process_group(groups[1])
    assert [total(each, rank) for each in (groups[0], groups[2], groups[3])] == [everybody] * 3
    alone = c10d.new_group([rank], use_local_synchronization=True)
    assert total(alone, rank) == 10.0**rank
    assert total(group, rank) == everybody


@cell(sides=OVER, sizes=(3,))
def a_group_split(group: Any, rank: int, size: int) -> Any:
    """rankmesh.torch.split_group: ranks are those of the parent, which here has others than the world."""
    pair = c10d.new_group([1, 2])
    halves = rankmesh.torch.split_group(split_ranks=[[0, 2], [1]], group_desc="half")
    assert c10d.get_process_group_ranks(halves) == ([1] if rank == 1 else [0, 2])
    assert total(halves, rank) == (10 if rank == 1 else 101)
    assert halves.group_desc == "half"
    if rank:
        alone = rankmesh.torch.split_group(pair, [[0], [1]])
        assert c10d.get_process_group_ranks(alone) == [rank]
        only = rankmesh.torch.split_group(pair, [[1]])
        assert (only is None) == (rank == 1)
        for made in (alone, pair) if only is None else (alone, only, pair):
            c10d.destroy_process_group(made)
    for wrong in (None, [], [[]], [[0], [0]], [[3]]):
        with pytest.raises(ValueError, match=r"split_ranks"):
            rankmesh.torch.split_group(split_ranks=wrong)


@cell(sides=OVER, sizes=(3,))
def a_split_of_an_unsorted_parent(group: Any, rank: int, size: int) -> Any:
    """The new ranks are in the order of the parent, as in the SDK, and in a group of gloo made in that order."""
    parent = c10d.new_group([2, 0, 1], sort_ranks=False)
    part = rankmesh.torch.split_group(parent, [[1, 0], [2]])
    gloo = c10d.new_group([2, 0], backend="gloo", sort_ranks=False)
    if rank == 1:
        assert (part.rank(), part.size()) == (0, 1)
    else:
        gathered: list[Any] = [None, None]
        c10d.all_gather_object(gathered, rank, group=part)
        assert gathered == c10d.get_process_group_ranks(part) == c10d.get_process_group_ranks(gloo) == [2, 0]
        assert (part.rank(), part.size()) == (gloo.rank(), gloo.size())
    for made in (parent, part) if rank == 1 else (parent, part, gloo):
        c10d.destroy_process_group(made)


@cell(sides=OVER, sizes=SEVERAL)
def a_split_after_a_destroyed_one(group: Any, rank: int, size: int) -> Any:
    """The new group's name is that of no other one, though there are as many groups as when that was made."""
    first, second = (rankmesh.torch.split_group(split_ranks=[range(size)]) for _ in range(2))
    c10d.destroy_process_group(first)
    third = rankmesh.torch.split_group(split_ranks=[range(size)])
    assert second.group_name != third.group_name
    everybody = sum(10.0**each for each in range(size))
    assert [total(each, rank) for each in (second, third)] == [everybody] * 2
    c10d.destroy_process_group(second)
    c10d.destroy_process_group(third)


@cell(sides=OVER, sizes=SEVERAL)
def a_group_of_gloo_after_one_of_rankmesh(group: Any, rank: int, size: int) -> Any:
    """Only the members make torch's group of it, as for DistributedDataParallel."""
    some = rankmesh.new_group([0])
    if rank == 0:
        c10d.destroy_process_group(torch_group(some))
    assert total(c10d.new_group(backend="gloo"), rank) == sum(10.0**each for each in range(size))


@cell(sides=OVER)
def what_rankmesh_torch_needs(group: Any, rank: int, size: int) -> Any:
    """Its functions take groups over the mesh, and say so of others."""
    gloo = c10d.new_group(backend="gloo")
    with pytest.raises(TypeError, match="gloo"):
        rankmesh.torch.monitored_barrier(gloo)
    with pytest.raises(TypeError, match="gloo"):
        rankmesh.torch.split_group(gloo, [[0]])
    assert rankmesh.torch.monitored_barrier() is None
    assert rankmesh.torch.monitored_barrier(c10d.GroupMember.NON_GROUP_MEMBER) is None
    assert rankmesh.torch.monitored_barrier(group, timedelta(seconds=20), wait_all_ranks=True) is None
    assert group.monitored_barrier() is None


@cell()
def its_names(group: Any, rank: int, size: int) -> Any:
    """What is the same as gloo's is told, what is the mesh's own is looked at."""
    name = "rankmesh" if isinstance(group, rankmesh.torch.ProcessGroup) else "gloo"
    assert c10d.get_backend(group) == group.name() == name
    other = c10d.new_group(backend=name, group_desc="for a test")
    assert c10d.distributed_c10d._resolve_process_group(other.group_name) is other
    device = torch.device("cpu")
    return (
        (group.rank(), group.size(), other.rank(), other.size()),
        (other.group_desc, bool(other.group_name), other.group_name != group.group_name),
        device in other._device_types,
        c10d.distributed_c10d._get_pg_default_device(group),
    )


@cell()
def options_of_its_backend(group: Any, rank: int, size: int) -> Any:
    """Torch reads the options of a group's backend, to make another group like it."""
    name = group.name()
    other = c10d.new_group(backend=name, timeout=timedelta(seconds=70))
    options = other._get_backend(torch.device("cpu")).options
    assert options.backend == name
    return options._timeout, options.global_ranks_in_group, options.group_name == other.group_name


@cell(sides=OVER)
def its_own_backend(group: Any, rank: int, size: int) -> Any:
    backend = group._get_backend(torch.device("cpu"))
    assert backend is group
    assert not backend.supports_splitting
    assert not backend.supports_coalescing
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    assert c10d.Backend.RANKMESH == "rankmesh"
    assert c10d.is_backend_available("rankmesh")
    assert f"rank {rank} of {size}" in repr(group)
    assert group.gateway is None or group.gateway.startswith("http://")
    with pytest.raises(ValueError, match="no backend for tensors on 'meta'"):
        group._get_backend(torch.device("meta"))
    with pytest.raises(ValueError, match="pg_options"):
        c10d.new_group([rank], pg_options=object(), use_local_synchronization=True)


@cell(sides=OVER)
def sequence_numbers(group: Any, rank: int, size: int) -> Any:
    own = c10d.new_group()
    first = own._get_sequence_number_for_group()
    for number in range(3):
        c10d.all_reduce(torch.ones(1), group=own)
        assert own._get_sequence_number_for_group() == first + number + 1
    own._set_sequence_number_for_group()
    gathered: list[Any] = [None] * size
    c10d.all_gather_object(gathered, own._get_sequence_number_for_group())
    assert gathered == [first + 3] * size


@cell(sizes=(2,), call=["all_reduce", "broadcast", "barrier", "all_gather", "all_to_all", "send"])
def what_a_profiler_sees(group: Any, rank: int, size: int, call: str) -> Any:
    """The same calls under the same names, but for the backend's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if call == "send":
            transfer = c10d.send if rank == 0 else c10d.recv
            transfer(torch.ones(2), 1 - rank, group)
        else:
            arguments = {
                "all_reduce": (torch.ones(2),),
                "broadcast": (torch.ones(2), 0),
                "barrier": (),
                "all_gather": ([torch.ones(2)] * size, torch.ones(2)),
                "all_to_all": ([torch.ones(1)] * size, [torch.ones(1)] * size),
            }[call]
            getattr(c10d, call)(*arguments, group=group)
    seen = {event.key for event in profile.key_averages()}
    return sorted(name.partition(":")[2] for name in seen if name.startswith(f"{group.name()}:"))


@cell(sizes=(2,))
def calls_that_go_on_in_a_profile(group: Any, rank: int, size: int) -> Any:
    """Their spans end with them, in other threads; which are there when the profile ends is luck."""
    tensors = [torch.tensor([rank + 1.0]) for _ in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        works = [c10d.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        waited = works[0].get_future().wait()
        for work in works:
            work.wait()
    return waited, tensors
