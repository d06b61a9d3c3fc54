"""Start-up and idle cost of a world of RankMesh's launcher: ``python -m benchmarks.join`` prints them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cases import Case, Cell
from benchmarks.results import Results
from benchmarks.rounds import progress
from benchmarks.workers import MeasurementError

RANKS = (4, 8, 16, 32)
IDLE_RANKS, IDLE_SECONDS, SETTLE_SECONDS, DEADLINE = 4, 10.0, 2.0, 120.0
_RANK = """
import numpy, os, sys, time
if len(sys.argv) > 2:
    import rankmesh as dist
    dist.init_process_group()
    dist.barrier()
with open(f"{sys.argv[1]}/{os.getpid()}.new", "w") as ready:
    ready.write(repr(time.monotonic()))
os.rename(ready.name, ready.name[:-4])
end = time.monotonic() + 600
while os.path.exists(sys.argv[1] + "/go") and time.monotonic() < end:
    time.sleep(0.2)
"""
_OTHERS = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "PYTHONDONTWRITEBYTECODE")
"""Variables that would send ranks elsewhere, or have them compile every module."""


def measure(rounds: int, results: Results) -> None:
    """Measure joins and an idle world, and add them to the results."""
    for number in range(rounds):
        progress(f"joins: round {number + 1} of {rounds}")
        for ranks in RANKS:
            results.add(Cell(Case("join", ranks), "rankmesh"), [1e6 * join(ranks)])
    progress(f"{IDLE_RANKS} ranks: idle")
    for name, value in idle(IDLE_RANKS).items():
        results.add(Cell(Case(name, IDLE_RANKS), "rankmesh"), [value])


def join(ranks: int) -> float:
    """Return the seconds from before the launcher starts until the last rank is ready."""
    with ExitStack() as stack:
        began = time.monotonic()
        return max(_start(stack, ranks).values()) - began


def idle(ranks: int) -> dict[str, float]:
    """Return the most that an idle rank takes: MB of resident memory beyond a process with NumPy alone, % of a core."""
    with ExitStack() as stack:
        pids, (bare,) = list(_start(stack, ranks)), list(_start(stack, 0))
        time.sleep(SETTLE_SECONDS)
        before = [processor_seconds(pid) for pid in pids]
        time.sleep(IDLE_SECONDS)
        used = [processor_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        most = max(_resident(pid) for pid in pids) - _resident(bare)
    return {"rss_mb": most / 1e6, "idle_percent": 100 * max(used) / IDLE_SECONDS}


def _start(stack: ExitStack, ranks: int) -> Mapping[int, float]:
    """Start ranks, or for 0 a process with NumPy alone; return the moment each was ready, by process id."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankmesh-join-")))
    (folder / "go").touch()
    (folder / "rank.py").write_text(_RANK)
    launcher = ["-m", "rankmesh.run", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(folder / "rank.py"), str(folder), *["join"] * bool(ranks)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    stack.callback(process.kill)
    stack.callback(process.wait, DEADLINE)
    stack.callback((folder / "go").unlink)
    deadline = time.monotonic() + DEADLINE
    while len(ready := [path for path in folder.iterdir() if path.name.isdigit()]) < max(1, ranks):
        if process.poll() is not None or time.monotonic() > deadline:
            raise MeasurementError(f"{len(ready)} of {ranks} ranks became ready; what they wrote is above")
        time.sleep(0.01)
    return {int(path.name): float(path.read_text()) for path in ready}


def _resident(pid: int) -> int:
    return 1024 * int(re.search(r"^Rss: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1])  # type: ignore[index]


def processor_seconds(pid: int) -> float:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


if __name__ == "__main__":
    found = Results()
    measure(3, found)
    for cell in found.turns:
        print(f"{cell.case.operation:14} {cell.case.ranks:3} ranks: {found.median(cell):12.2f}")
