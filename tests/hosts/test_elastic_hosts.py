"""``rankmesh run --nnodes MIN:MAX`` on several hosts, one of which is cut off, and heals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

DIGITS = Path(__file__).parents[2] / "examples" / "train_digits.py"
SLOW_DIGITS = f"""\
import os
import sys
import time

sys.path.insert(0, {str(DIGITS.parent)!r})
import train_digits

step = train_digits.Momentum.step


def slow_step(self, gradients):
    while os.path.exists("slow"):
        time.sleep(0.1)
        break
    step(self, gradients)


train_digits.Momentum.step = slow_step
sys.exit(train_digits.main())
"""
"""The example, whose steps take a tenth of a second as long as a file is there."""


@pytest.mark.parametrize("count", [2, 3])
def test_a_host_that_is_cut_off_and_heals(request, count: int) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    hosts = request.getfixturevalue("hosts" if count == 2 else "three_hosts")
    (hosts.folder / "slow_digits.py").write_text(SLOW_DIGITS)
    slow = hosts.folder / "slow"
    slow.touch()
    checkpoint = hosts.folder / "digits.npz"
    nodes = f"--nnodes 1:{count} --nproc-per-node 1 --master-addr host1"
    launcher = f"rankmesh run {nodes} --max-restarts 1 --join-window 4"
    script = f"slow_digits.py --epochs 20 --checkpoint {checkpoint}"
    first, *others = (
        hosts.start(f"host{number + 1}", f"{launcher} {script}", RANKMESH_TOKEN="the secret of all")
        for number in range(count)
    )
    lost = others[-1]
    whole = f"on node 0 of {count}", f"on {count} nodes; this is node 0"  # the last host may have come late
    wait_until(lambda: any(text in first.output for text in whole), f"{count} nodes: {first!r}", 60)
    wait_until(checkpoint.exists, "the first epoch to be complete")
    hosts.cut(lost.name.partition("-")[2])
    first.wait_for(f"restart 1 of 1: all {count - 1} ranks start again" if count > 2 else "the rank starts again")
    first.wait_for("goes on after")
    lost.wait_for("waits for the gateway of job")
    written = checkpoint.stat().st_mtime
    wait_until(lambda: checkpoint.stat().st_mtime > written, "an epoch without the host", 60)
    hosts.heal(lost.name.partition("-")[2])
    first.wait_for(f"{lost.name.partition('-')[2]} joins: the job starts again with {count} nodes")
    slow.unlink()
    assert [each.wait() for each in (first, *others)] == [0] * count, hosts.transcript()
    output = first.output.replace("[rank 0] ", "")
    assert f"[rankmesh] all {count} ranks start again on {count} nodes; this is node 0" in output, hosts.transcript()
    assert "all ranks identical" in output, hosts.transcript()
    assert "single process: equal" in output, hosts.transcript()
    accuracy = re.search(r"test accuracy: ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95
