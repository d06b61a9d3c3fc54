"""DistributedDataParallel with torch: torch's own, and only over the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed
from torch import nn

from rankmesh.nn.parallel import DistributedDataParallel


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"there is none: call torch\.distributed\.init_process_group"):
        DistributedDataParallel(nn.Linear(2, 1))


@pytest.mark.usefixtures("gloo")
def test_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="over the mesh, and this one has the backend 'gloo'"):
        DistributedDataParallel(nn.Linear(2, 1))


@pytest.mark.usefixtures("gloo")
def test_over_the_mesh_it_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "rankmesh")
    model = DistributedDataParallel(nn.Linear(2, 1), bucket_cap_mb=1)
    assert type(model) is nn.parallel.DistributedDataParallel
    model(torch.ones(4, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[4.0, 4.0]]
