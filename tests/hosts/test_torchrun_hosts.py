"""docs/clusters.md: torchrun on two hosts, and rankmesh's own init_process_group() in its ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.host_commands import has_torch

NEEDS_TORCH = pytest.mark.skipif(not has_torch(), reason="needs torch: make test-torch installs it")
pytestmark = [pytest.mark.hosts, pytest.mark.processes, NEEDS_TORCH]

AVERAGE = Path(__file__).parents[2] / "examples" / "average.py"
WAYS = {
    "static": "--node-rank {node} --master-addr host1 --master-port 29500",
    "c10d": "--rdzv-backend c10d --rdzv-endpoint host2:29500 --rdzv-id average",
}
"""c10d: whichever host is first gets rank 0, and MASTER_ADDR is host2 all the same."""


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_plain_init_process_group(hosts, way) -> None:
    started = [
        hosts.start(
            f"host{node + 1}",
            f"python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 {way.format(node=node)} {AVERAGE}",
            RANKMESH_TOKEN="the secret of both",
        )
        for node in (0, 1)
    ]
    assert [each.wait() for each in started] == [0, 0], hosts.transcript()
    reported = re.findall(r"rank (\d) of 4 on host(\d)", "".join(each.output for each in started))
    assert sorted(rank for rank, _ in reported) == ["0", "1", "2", "3"], hosts.transcript()
    assert sorted(host for _, host in reported) == ["1", "1", "2", "2"], hosts.transcript()
