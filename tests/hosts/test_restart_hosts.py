"""``rankmesh run --max-restarts`` on two hosts, one of which is lost and comes back."""

from __future__ import annotations

import pytest
from support.host_commands import why_not

from tools.faults.recovery import KINDS, job

pytestmark = [pytest.mark.hosts, pytest.mark.processes]


def test_a_host_that_is_lost_in_mid_training_and_comes_back() -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    if why := why_not():
        pytest.skip(f"several hosts: {why}")
    kind = KINDS["hosts"]._replace(program="train_digits --checkpoint digits.npz --epochs 12", epochs=12)
    ending = job(kind, 3, 100, 0.0)
    assert (ending.code, ending.left) == (0, []), ending.output
    assert "of 2: all 4 ranks start again" in ending.output
    assert "goes on after" in ending.output
    assert "single process: equal" in ending.output
    assert len(ending.parameters) == 1, ending.parameters


CUT = """\
import os
import time

import numpy as np

import rankmesh as dist

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
timeout = 5 if attempt == "0" else 60
dist.init_process_group(timeout=60)
for step in range(2 if attempt != "0" else 1_000_000):
    array = np.ones(4)
    dist.all_reduce(array, timeout=timeout)
    if step == 1 and dist.get_rank() % 2 == 0:
        print("sum", array[0], "in attempt", attempt, flush=True)
    time.sleep(0.01)
dist.destroy_process_group()
"""


def test_a_host_that_is_cut_off_and_comes_back(hosts) -> None:
    """One launcher waits for the other's node, the other for the gateway; the job uses one restart."""
    (hosts.folder / "cut.py").write_text(CUT)
    options = "--nproc-per-node 2 --master-addr host1 --master-port 29500 --max-restarts 1 --failure-grace 1 cut.py"
    started = [
        hosts.start(
            f"host{node + 1}",
            f"rankmesh run --nnodes 2 --node-rank {node} {options}",
            RANKMESH_TOKEN="the secret of both",
        )
        for node in (0, 1)
    ]
    for each in started:
        each.wait_for("in attempt 0")
    hosts.cut("host2")
    started[0].wait_for("1 of 2 node(s) are there: node 0 (host1); missing: node 1")
    started[1].wait_for("waits for the gateway of job 'host1-29500' at http://host1:29500")
    hosts.heal("host2")
    assert [each.wait() for each in started] == [0, 0], hosts.transcript()
    assert all("restart 1 of 1: all 4 ranks start again" in each.output for each in started), hosts.transcript()
    assert all("sum 4.0 in attempt 1" in each.output for each in started), hosts.transcript()
