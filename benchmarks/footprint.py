"""What an idle rank costs beyond Python and NumPy: memory, processor time, threads: ``python -m benchmarks.footprint``.

Ranks of one world are started, left alone until they have settled, and looked at from outside, through /proc; beside
them a process that has imported NumPy and sleeps.

*Resident* memory (RSS) is what the process has in memory, pages of libraries and of shared memory counted in full;
*proportional* (PSS) divides each page by the number of processes that have it; *own* (USS) counts only pages that
nobody else has.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.join import clean_environment, end, free_port
from benchmarks.options import number
from benchmarks.tables import table
from benchmarks.team import PeerFailedError

START_SECONDS = 120.0
SETTLE_SECONDS = 2.0
_BARE = "import sys, numpy; print(0, flush=True); sys.stdin.read()"
_RANK = """
import sys, numpy, rankmesh as dist

dist.init_process_group()
dist.barrier()
print(dist._session.session.require_session().agent.member.http if len(sys.argv) > 1 else 0, flush=True)
sys.stdin.read()
dist.destroy_process_group()
"""


class Memory(NamedTuple):
    """Bytes of a process, as the module's docstring defines them."""

    resident: int
    proportional: int
    own: int


class Footprint(NamedTuple):
    """What one process takes.

    Attributes:
        memory: its bytes.
        processor: of one core, how much it used while it was idle: 0.01 is a hundredth.
        threads: how many it has.
        descriptors: how many files it has open.
    """

    memory: Memory
    processor: float
    threads: int
    descriptors: int


class World(NamedTuple):
    """The footprints of a world's ranks, by rank (rank 0 hosts the gateway), and of a process with NumPy alone."""

    ranks: list[Footprint]
    bare: Footprint

    def beyond(self, rank: int) -> Memory:
        """Return the bytes a rank has more than the process with NumPy alone."""
        return Memory(*(a - b for a, b in zip(self.ranks[rank].memory, self.bare.memory, strict=True)))


def measure(ranks: int, seconds: float = 10.0, *, asked: bool = False) -> World:
    """Start a world and return what its ranks take while they do nothing.

    Args:
        ranks: how many.
        seconds: how long to watch their processor time.
        asked: whether each rank's HTTP face is asked once before: an agent loads the web framework only then.

    Raises:
        PeerFailedError: a rank did not start.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    with ExitStack() as cleanup:
        bare = cleanup.enter_context(_Process([sys.executable, "-c", _BARE], shared))
        started = [
            cleanup.enter_context(
                _Process([sys.executable, "-c", _RANK, *["asked"] * asked], {**shared, **place, "RANK": str(rank)})
            )
            for rank in range(ranks)
        ]
        for process in (bare, *started):
            url = process.wait_until_ready()
            if url != "0":
                urllib.request.urlopen(f"{url}/health", timeout=START_SECONDS).close()
        time.sleep(SETTLE_SECONDS)
        everyone = [bare, *started]
        before, began = [_busy_seconds(process.pid) for process in everyone], time.monotonic()
        time.sleep(seconds)
        used = [_busy_seconds(process.pid) for process in everyone]
        took = time.monotonic() - began
        found = [
            Footprint(_memory(process.pid), (after - earlier) / took, *_counts(process.pid))
            for process, earlier, after in zip(everyone, before, used, strict=True)
        ]
    return World(found[1:], found[0])


def report(worlds: Sequence[tuple[int, bool, World]]) -> str:
    """Return a table: what the hosting rank and the others (the median) take beyond Python with NumPy."""
    rows = []
    for ranks, asked, world in worlds:
        for who, which in (("rank 0", range(1)), ("others", range(1, ranks))):
            if not which:
                continue
            beyond = [world.beyond(rank) for rank in which]
            busy = max(world.ranks[rank].processor for rank in which)
            rows.append(
                [
                    f"{who}{', asked' if asked else ''}",
                    str(ranks),
                    *(f"{median(kind) / 1e6:.1f}" for kind in zip(*beyond, strict=True)),
                    f"{median(world.ranks[rank].memory.resident for rank in which) / 1e6:.1f}",
                    f"{100 * busy:.2f}",
                    str(max(world.ranks[rank].threads for rank in which)),
                    str(max(world.ranks[rank].descriptors for rank in which)),
                ]
            )
    headings = ["resident, MB more", "proportional", "own", "resident in all", "CPU, %", "threads", "descriptors"]
    return table(["idle", "ranks", *headings], rows, texts=1)


class _Process:
    """A process that says a line when it is ready, and ends when its standard input does."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        if error[0] is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(START_SECONDS)
        end([self._process])
        self._process.stdout.close()  # type: ignore[union-attr]

    def wait_until_ready(self) -> str:
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        line = self._process.stdout.readline().strip() if ready else ""  # type: ignore[union-attr]
        if not line:
            what = "ended before it was ready; what it wrote is above" if ready else f"took {START_SECONDS:g} s"
            raise PeerFailedError(f"RankMesh: process {self.pid} {what}")
        return line


def _memory(pid: int) -> Memory:
    lines = dict(re.findall(r"^(\w+): +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    return Memory(
        1024 * int(lines["Rss"]),
        1024 * int(lines["Pss"]),
        1024 * (int(lines["Private_Clean"]) + int(lines["Private_Dirty"])),
    )


def _busy_seconds(pid: int) -> float:
    """Return the processor time of all threads, to the nanosecond where the kernel tells it so."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _counts(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line (None: this process's) says, print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint")
    parser.add_argument("--ranks", type=number, nargs="+", default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--asked", action="store_true", help="ask every rank's HTTP face once before")
    options = parser.parse_args(arguments)
    try:
        worlds = [
            (count, options.asked, measure(count, options.seconds, asked=options.asked)) for count in options.ranks
        ]
    except PeerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print(report(worlds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
