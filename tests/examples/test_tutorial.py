"""The tutorial's programs print what the tutorial says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import complaints_in

pytestmark = pytest.mark.processes

RING = [f"Rank  {rank}  agrees with dist.all_reduce, sum of all  2017.839046" for rank in range(4)]

PRINTED = {
    "template.py": ["Rank 0 of 2 is here", "Rank 1 of 2 is here"],
    "blocking_p2p.py": ["Rank  0  has data  1.0", "Rank  1  has data  1.0"],
    "nonblocking_p2p.py": [
        "Rank  0  has data  1.0",
        "Rank  1  has data  1.0",
        "Rank 0 started sending",
        "Rank 1 started receiving",
    ],
    "all_reduce.py": ["Rank  0  has data  2.0", "Rank  1  has data  2.0", "Rank  2  has data  1.0"],
    "ring_all_reduce.py": RING,
}


@pytest.mark.parametrize("program", PRINTED)
def test_program_prints(python: Callable[..., subprocess.CompletedProcess[str]], examples: Path, program: str) -> None:
    done = python(examples / "tutorial" / program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == PRINTED[program]
    assert complaints_in(done.stderr) == ""


def test_no_program_is_forgotten(examples: Path) -> None:
    assert {path.name for path in (examples / "tutorial").glob("*.py")} == set(PRINTED)
