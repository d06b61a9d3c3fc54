"""``rankmesh diagnose`` of a job with a host that is cut off: the row of docs/diagnose.md."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.diagnose_page import normalized, page_rows, row_of
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

SCRIPT = """
import os, pathlib
import numpy as np
import rankmesh as dist

dist.init_process_group(timeout=60)
rank, data = dist.get_rank(), np.ones(1000, np.float32)
dist.barrier()
pathlib.Path(f"going-{rank}").touch()
try:
    while True:
        dist.all_reduce(data)
except dist.DistBackendError:
    os._exit(0)  # on the cut side a goodbye would take its time
"""


def test_a_rank_that_is_cut_off_is_named(hosts) -> None:
    (hosts.folder / "train_loop.py").write_text(SCRIPT)
    token = {"RANKMESH_TOKEN": "the secret of both"}
    place = {rank: "host2" if rank == 2 else "host1" for rank in range(4)}
    started = {
        rank: hosts.start(
            host,
            "python train_loop.py",
            RANK=str(rank),
            WORLD_SIZE="4",
            MASTER_ADDR="host1",
            MASTER_PORT="29500",
            RANKMESH_BIND=hosts.addresses[host],
            **token,
        )
        for rank, host in place.items()
    }
    for rank in place:
        path = hosts.folder / f"going-{rank}"
        wait_until(path.exists, f"rank {rank}")
    hosts.cut("host2")

    def look() -> dict[str, Any] | None:
        done = hosts.start("host1", "rankmesh diagnose --json", RANKMESH_GATEWAY="http://host1:29500", **token)
        assert done.wait() in (0, 1), done
        findings = json.loads(done.output)["findings"]
        settled = [each["kind"] for each in findings] == ["silent"] and findings[0]["seconds"] >= 1
        return findings[0] if settled else None

    found = wait_until(look, "the verdict", 60.0)
    text = hosts.start("host1", "rankmesh diagnose", RANKMESH_GATEWAY="http://host1:29500", **token)
    assert text.wait() == 1, text
    assert (found["ranks"], found["waiting"]) == ([2], [0, 1, 3])
    output = text.output.replace(hosts.addresses["host2"], "192.0.2.2")
    assert normalized(page_rows()["cut off from the network"]) == normalized(row_of(output)), output
    for each in started.values():
        each.end()
