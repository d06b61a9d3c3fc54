"""torch over the mesh on two hosts, started by torchrun as people do: nothing but its own variables is set."""

from __future__ import annotations

import pytest
from support.host_commands import has_torch

NEEDS_TORCH = pytest.mark.skipif(not has_torch(), reason="needs torch: make test-torch installs it")
pytestmark = [pytest.mark.hosts, pytest.mark.processes, NEEDS_TORCH]

TRAIN = """\
import torch
import torch.distributed as dist

dist.init_process_group("rankmesh")
ones = torch.full((100_000,), float(dist.get_rank() + 1))
dist.all_reduce(ones)
group = dist.new_group([0, 3])
if dist.get_rank() in (0, 3):
    dist.all_reduce(ones, group=group)
print(dist.get_rank(), ones[0].item(), dist.group.WORLD.mesh._communicator.medium, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("secret", ["", "known to both hosts"], ids=["without-token", "with-token"])
def test_torchrun_on_two_hosts(hosts, secret: str) -> None:
    (hosts.folder / "train.py").write_text(TRAIN)
    command = "torchrun --nnodes 2 --nproc-per-node 2 --master-addr host1 --master-port 29500 --node-rank {} train.py"
    variables = {"RANKMESH_TOKEN": secret} if secret else {}
    first, second = [hosts.start(f"host{n + 1}", command.format(n), **variables) for n in range(2)]
    assert (first.wait(180.0), second.wait(180.0)) == (0, 0), hosts.transcript()
    for rank, started in enumerate((first, first, second, second)):
        value = 20.0 if rank in (0, 3) else 10.0
        assert f"{rank} {value} shm+tcp" in started.output, hosts.transcript()
