"""A host that is cut off from the others during a call: all name its ranks, not the ranks that wait for them."""

from __future__ import annotations

import json

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

SCRIPT = """
import json, os, pathlib, time
import numpy as np
import rankmesh as dist

dist.init_process_group()
rank, array = dist.get_rank(), np.ones(int(os.environ["COUNT"]), np.float32)
dist.barrier()
pathlib.Path(f"going-{rank}").touch()
try:
    while True:
        dist.all_reduce(array, timeout=3)
except dist.DistBackendError as error:
    print(json.dumps({"ranks": list(error.ranks), "text": str(error)}), flush=True)
    time.sleep(2)  # the others have their deadlines, too
os._exit(0)  # on the cut side a goodbye would take its time
"""


@pytest.mark.parametrize("count", [1, 2_000_000])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_the_ranks_that_are_cut_off_are_named(hosts, transport, count) -> None:
    (hosts.folder / "script.py").write_text(SCRIPT)
    place = {rank: "host2" if rank == 2 else "host1" for rank in range(4)}
    started = {
        rank: hosts.start(
            host,
            "python script.py",
            RANK=str(rank),
            WORLD_SIZE="4",
            MASTER_ADDR="host1",
            MASTER_PORT="29500",
            RANKMESH_TOKEN="the secret of both",
            RANKMESH_BIND=hosts.addresses[host],
            RANKMESH_TRANSPORT=transport,
            COUNT=str(count),
        )
        for rank, host in place.items()
    }
    for rank in place:
        path = hosts.folder / f"going-{rank}"
        wait_until(path.exists, f"rank {rank}")
    hosts.cut("host2")
    codes = {rank: each.wait() for rank, each in started.items()}
    assert set(codes.values()) == {0}, hosts.transcript()
    for rank, each in started.items():
        reported = json.loads(each.output.splitlines()[-1])
        culprits = {0, 1, 3} if rank == 2 else {2}
        assert reported["ranks"], hosts.transcript()
        assert set(reported["ranks"]) <= culprits, hosts.transcript()
