"""A host that is cut off from the others during a call: its ranks are named, not the ranks that wait for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.diagnose_page import normalized, page_rows, row_of
from support.host_commands import Hosts, Started
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

TOKEN = "the secret of both"
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
        dist.all_reduce(array, timeout=int(os.environ["SECONDS"]))
except dist.DistBackendError as error:
    print(json.dumps({"ranks": list(error.ranks), "text": str(error)}), flush=True)
    time.sleep(2)  # the others have their deadlines, too
os._exit(0)  # on the cut side a goodbye would take its time
"""


def cut_off(hosts: Hosts, *, count: int, seconds: int, transport: str = "auto") -> list[Started]:
    """Start four ranks, of which rank 2 is on host2, and cut that off."""
    (hosts.folder / "train_loop.py").write_text(SCRIPT)
    started = [
        hosts.start(
            host,
            "python train_loop.py",
            RANK=str(rank),
            WORLD_SIZE="4",
            MASTER_ADDR="host1",
            MASTER_PORT="29500",
            RANKMESH_TOKEN=TOKEN,
            RANKMESH_BIND=hosts.addresses[host],
            RANKMESH_TRANSPORT=transport,
            COUNT=str(count),
            SECONDS=str(seconds),
        )
        for rank, host in enumerate(["host1", "host1", "host2", "host1"])
    ]
    for rank in range(4):
        wait_until((hosts.folder / f"going-{rank}").exists, f"rank {rank}")
    hosts.cut("host2")
    return started


@pytest.mark.parametrize("count", [1, 2_000_000])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_the_ranks_that_are_cut_off_are_named(hosts: Hosts, transport: str, count: int) -> None:
    started = cut_off(hosts, count=count, seconds=6, transport=transport)
    assert [each.wait() for each in started] == [0] * 4, hosts.transcript()
    for rank, each in enumerate(started):
        reported = json.loads(each.output.splitlines()[-1])
        culprits = {0, 1, 3} if rank == 2 else {2}
        assert reported["ranks"], hosts.transcript()
        assert set(reported["ranks"]) <= culprits, hosts.transcript()


def test_diagnose_names_a_rank_that_is_cut_off(hosts: Hosts) -> None:
    """It is a row of docs/stuck-job.md."""
    cut_off(hosts, count=1000, seconds=60)
    gateway = {"RANKMESH_GATEWAY": "http://host1:29500", "RANKMESH_TOKEN": TOKEN}

    def look() -> dict[str, Any] | None:
        done = hosts.start("host1", "rankmesh diagnose --json", **gateway)
        assert done.wait() in (0, 1), done
        findings = json.loads(done.output)["findings"]
        settled = [each["kind"] for each in findings] == ["silent"] and findings[0]["seconds"] >= 1
        return findings[0] if settled else None

    found = wait_until(look, "the finding", 60.0)
    text = hosts.start("host1", "rankmesh diagnose", **gateway)
    assert text.wait() == 1, text
    assert (found["ranks"], found["waiting"]) == ([2], [0, 1, 3])
    output = text.output.replace(hosts.addresses["host2"], "192.0.2.2")
    assert normalized(page_rows()["cut off from the network"]) == normalized(row_of(output)), output
