"""``rankmesh observe`` of mpi4py programs: docs/mpi.md, and a column of docs/stuck-job.md's table."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.consoles import below, fits, run, steps_of
from support.mpi import MPIRUN, OPTIONS, files_in
from support.observed import ALONE, OBSERVE, Stuck, check_row, message_kinds, print_column
from support.processes import Rank, Ranks

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "mpi.md"
SCRIPT = """\
import ctypes, os, queue, signal, subprocess, sys, time
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
data, total, large = np.ones(1000, np.float32), np.ones(1000, np.float32), np.ones(5_000_000, np.float32)
{before}
for step in range(3):
    if step == 2 and rank == 2:
{stuck}
    comm.Allreduce(data, total)
time.sleep(3600)
"""
KINDS = [
    *ALONE,
    Stuck(
        "calls of two groups in another order",
        "pass",
        "order",
        [0, 1, 2, 3],
        [],
        """
        one, other = comm.Split(rank // 2), comm.Split(rank // 2)
        if rank == 0:
            one.Allreduce(data, total)
            other.Barrier()
        if rank == 1:
            other.Barrier()
            one.Allreduce(data, total)
        """,
    ),
    *message_kinds("comm.Send", "comm.Recv"),
]


def mpirun(ranks: Ranks, script: Path) -> Rank:
    assert MPIRUN is not None
    command = [MPIRUN, *OPTIONS, "-n", "4", *OBSERVE, sys.executable, str(script)]
    return ranks.launch(command, name="mpirun", **files_in(ranks.folder))


@pytest.mark.parametrize("stuck", KINDS, ids=lambda stuck: stuck.title)
def test_the_report_is_the_pages(ranks: Ranks, stuck: Stuck):
    check_row(ranks, stuck, SCRIPT, mpirun, column=1)


def test_the_page(ranks: Ranks):
    page = below(PAGE.read_text(), "A stuck MPI job")
    script = re.search(r"^```python\n# solve.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert script is not None
    (ranks.folder / "solve.py").write_text(f"# solve.py\n{script[1]}")
    programs = ranks.folder / "bin"
    programs.mkdir()
    assert MPIRUN is not None
    (programs / "mpirun").write_text(f'#!/bin/sh\nexec {MPIRUN} {" ".join(OPTIONS)} "$@"\n')
    (programs / "rankmesh").write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from rankmesh.cli import main; main()" "$@"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    steps = [each for each in steps_of(page) if not each.command.startswith("pip ")]
    printed = run(steps, ranks.folder, ranks.environment(PATH=path, **files_in(ranks.folder)), 120)
    for step, each in zip(steps, printed, strict=True):
        assert not step.printed or fits(each, step.printed), f"line {step.line}: {step.command}\n{each}"


if __name__ == "__main__":
    print_column(KINDS, SCRIPT, mpirun)
