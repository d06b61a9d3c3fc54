"""``rankmesh observe`` of torch's gloo under torchrun: a column of docs/stuck-job.md's table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.observed import ALONE, OBSERVE, TWO_GROUPS, Stuck, check_row, message_kinds, print_column
from support.processes import Rank, Ranks, free_port

pytestmark = pytest.mark.processes

SCRIPT = """\
import ctypes, os, queue, signal, subprocess, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
data, large = torch.ones(1000), torch.ones(5_000_000)
{before}
for step in range(3):
    if step == 2 and rank == 2:
{stuck}
    dist.all_reduce(data)
time.sleep(3600)
"""
KINDS = [
    *ALONE,
    Stuck("calls of two groups in another order", "pass", "order", [0, 1, 2, 3], [], TWO_GROUPS),
    Stuck("a key that no rank sets", "store.get('batch')"),
    *message_kinds("dist.send", "dist.recv"),
]


def torchrun(ranks: Ranks, script: Path) -> Rank:
    options = ["--nproc-per-node", "4", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--no-python"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *OBSERVE, sys.executable, str(script)]
    return ranks.launch(command, name="torchrun")


@pytest.mark.parametrize("stuck", KINDS, ids=lambda stuck: stuck.title)
def test_the_report_is_the_pages(ranks: Ranks, stuck: Stuck):
    check_row(ranks, stuck, SCRIPT, torchrun, column=2)


if __name__ == "__main__":
    print_column(KINDS, SCRIPT, torchrun)
