"""``rankmesh run --max-restarts`` on two hosts, one of which is lost and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = "--nproc-per-node 2 --master-addr host1 --master-port 29500 --max-restarts 2 held.py"
HELD = f"""\
import os, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import train_digits
steps, step = [], train_digits.Momentum.step
def held(self, gradients):
    steps.append(None)
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("3", "0") and len(steps) == 100:
        time.sleep(1000)  # its host is lost meanwhile
    step(self, gradients)
train_digits.Momentum.step = held
sys.exit(train_digits.main())
"""


def test_a_host_that_is_lost_in_mid_training_and_comes_back(hosts) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    checkpoint = hosts.folder / "digits.npz"
    (hosts.folder / "held.py").write_text(HELD)

    def start(node: int):
        command = f"rankmesh run --nnodes 2 --node-rank {node} {OPTIONS} --epochs 12 --checkpoint {checkpoint}"
        return hosts.start(f"host{node + 1}", command, RANKMESH_TOKEN="the secret of both")

    first, lost = start(0), start(1)
    wait_until(checkpoint.exists, "the first epoch to be complete")
    lost.end()
    back = start(1)
    assert [first.wait(), back.wait()] == [0, 0], hosts.transcript()
    assert "of 2: all 4 ranks start again" in first.output, hosts.transcript()
    assert "goes on after" in first.output, hosts.transcript()
    assert all(text in first.output for text in ("all ranks identical", "single process: equal")), hosts.transcript()


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
        hosts.start(f"host{node + 1}", f"rankmesh run --nnodes 2 --node-rank {node} {options}", RANKMESH_TOKEN="secret")
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
