"""Ranks that start jobs of their own: each has the ranks of one parent alone."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from support import inner_jobs
from support.launchers import Launchers

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "how",
    [
        "environment",
        "launcher",
        pytest.param("mpirun", marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")),
    ],
)
def test_the_jobs_of_two_ranks_do_not_mix(launchers: Launchers, how: str) -> None:
    program = [inner_jobs.__file__, how, inner_jobs.NUMPY]
    code, stdout, _ = launchers.finish(
        launchers.process(sys.executable, "-m", "rankmesh.run", "--nproc-per-node=2", *program)
    )
    assert code == 0
    assert sorted(re.findall(r"outer .*", stdout)) == ["outer 0: 0.0"] * 2 + ["outer 1: 2.0"] * 2
