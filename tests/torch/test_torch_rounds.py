"""Jobs of torch.distributed with the mesh for one device and another backend for others, one after the other."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as c10d
from support.processes import Me, on_ranks, wait_until
from torch._subclasses.fake_tensor import FakeTensorMode


def total() -> float:
    """Sum the ranks' numbers, 1 and 10."""
    tensor = torch.tensor([10.0 ** c10d.get_rank()])
    c10d.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@on_ranks(2, env={"TORCH_DISTRIBUTED_DEBUG": "{debug}", "TORCH_CPP_LOG_LEVEL": "ERROR"})
def test_jobs_one_after_the_other(me: Me) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL has torch wrap the groups of its own backends to check calls; not the mesh's."""
    c10d.set_debug_level_from_env()  # torch reads it when it is imported, here before the fork

    def init(backend: str, round: str) -> None:
        method = f"file://{me.folder}/{round}"
        c10d.init_process_group(backend, init_method=method, rank=me.rank, world_size=me.size)

    cuda = torch.device("cuda", 0)
    for named in ("rankmesh", "cpu:rankmesh,cuda:nccl", "cpu:rankmesh,cuda:rankmesh"):
        init(named, f"devices-{len(named)}")
        world, own = c10d.group.WORLD, named.endswith("cuda:rankmesh")
        assert (total(), [str(device) for device in world._device_types]) == (11, ["cpu"])
        assert (world.carries(torch.device("cpu")), world.carries(cuda), world.carries("meta")) == (True, own, False)
        if own:
            assert world._get_backend(cuda) is world
        elif named == "rankmesh":
            with pytest.raises(ValueError, match=r'name one when .*"cpu:rankmesh,cuda:rankmesh"'):
                world._get_backend(cuda)
        if own and importlib.util.find_spec("cupy") is None:  # the mesh's own function is asked
            with FakeTensorMode(), pytest.raises(RuntimeError, match="on a GPU cannot be communicated: CuPy is not"):
                c10d.all_reduce(torch.ones(2, device="cuda"))
        c10d.destroy_process_group()

    # gloo stands for a backend of another device; it takes the CPU's tensors, too
    init("cpu:rankmesh,meta:gloo", "beside")
    world = c10d.group.WORLD
    beside = world._get_backend(torch.device("meta"))
    tensor = torch.tensor([me.rank + 1.0])
    beside.allreduce([tensor]).wait()
    assert (total(), tensor.item()) == (11, 3)
    # tensors without memory: each call goes to torch's own group for that device, where there is nothing to do
    one, two = torch.ones(2, device="meta"), torch.ones(4, device="meta")
    c10d.all_reduce(one)
    c10d.all_gather_single(two, one)
    c10d.reduce_scatter_single(one, two)
    c10d.all_to_all_single(two, two)
    c10d.all_gather([one, one], one)
    assert world._get_backend(torch.device("meta")) is beside
    assert [str(device) for device in world._device_types] == ["cpu", "meta"]
    c10d.destroy_process_group()
    wait_until(lambda: me.resources()[0] == ["MainThread"], "the threads to end", 30)
