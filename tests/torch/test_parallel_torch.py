"""DistributedDataParallel with torch: torch's own, and only over the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed
from support.processes import Me, on_ranks
from torch import nn

import rankmesh as dist
from rankmesh.nn.parallel import DistributedDataParallel


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_without_a_process_group_it_says_what_to_do() -> None:
    says = r'there is none: call torch\.distributed\.init_process_group\("rankmesh"\) or rankmesh\.init_process_group'
    with pytest.raises(ValueError, match=says):
        DistributedDataParallel(nn.Linear(2, 1))


@pytest.mark.usefixtures("gloo")
def test_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="over the mesh, and this one has the backend 'gloo'"):
        DistributedDataParallel(nn.Linear(2, 1))


@on_ranks(3)
def test_over_rankmeshs_world_it_is_torchs_own(me: Me) -> None:
    torch.set_num_threads(1)
    mean = [-2.0, -2.0]

    def step(process_group: object = None) -> list[float]:
        torch.manual_seed(me.rank)  # the ranks begin with rank 0's parameters
        model = DistributedDataParallel(nn.Linear(2, 1), process_group=process_group)
        assert type(model) is nn.parallel.DistributedDataParallel
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model(torch.full((1, 2), me.rank + 1.0)).sum().backward()
        optimizer.step()
        return model.module.weight.tolist()[0]

    me.init()
    assert step() == mean
    group = torch.distributed.group.WORLD
    assert group.session.group is dist.GroupMember.WORLD, "torch's group is over rankmesh's world"
    assert step() == mean
    assert torch.distributed.group.WORLD is group
    part = dist.new_group([0, 2])
    if me.rank == 1:
        with pytest.raises(ValueError, match="this process is not a member of the group"):
            step(part)
    else:
        assert step(part) == mean
    torch.distributed.destroy_process_group()
    assert step() == mean
    assert dist.is_initialized(), "rankmesh's world is left"
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="needs a torch process group"):
        step()
    me.init(init_method=f"file://{me.folder}/another")
    assert step() == mean
    dist.destroy_process_group()
