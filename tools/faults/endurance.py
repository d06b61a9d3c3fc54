"""Descriptors, threads and memory of two ranks over many joins and many collectives: they must not grow.

``python -m tools.faults.endurance`` runs 1 000 cycles of init_process_group and destroy_process_group, then 100 000
collectives, over shared memory and over TCP, and prints what each rank held on the way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support import rank_server
from support.rank_server import Program

from tools.faults import PATHS

SIZE = 2
ALLOWED_KIB = 2048
"""Growth of a rank's memory from the first half of a run to the second that is no finding: the allocator's."""
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_SECONDS = 3600.0


class Held(NamedTuple):
    """What a process holds."""

    done: int
    descriptors: int
    threads: int
    mappings: int
    kib: int


def held(done: int) -> Held:
    """Return what this process holds, after ``done`` cycles or calls."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KIB
    return Held(done, len(os.listdir("/proc/self/fd")), threading.active_count(), len(maps), resident)


def cycles(me: Any, count: int, every: int, out: str) -> None:
    """Join and leave ``count`` times, with a sub-group, messages and the store in between."""
    import rankmesh as dist

    found = []
    array = np.ones(100_000, np.float32)
    for cycle in range(1, count + 1):
        dist.init_process_group(init_method=f"file://{me.folder}/{cycle}", rank=me.rank, world_size=me.size)
        group = dist.new_group([0, 1])
        dist.all_reduce(array, dist.ReduceOp.MAX)
        dist.all_reduce(array, dist.ReduceOp.MAX, group=group)
        (dist.send if me.rank else dist.recv)(array, 1 - me.rank)
        dist.get_default_store().add("cycles", 1)
        dist.barrier()
        dist.destroy_process_group()
        if not cycle % every:
            found.append(held(cycle))
    Path(f"{out}-{me.rank}").write_text(json.dumps(found))


def collectives(me: Any, count: int, every: int, out: str) -> None:
    """Make ``count`` collectives of several sizes in one world, some of them asynchronous."""
    import rankmesh as dist

    dist.init_process_group(init_method=f"file://{me.folder}/rendezvous", rank=me.rank, world_size=me.size)
    found = []
    arrays = [np.ones(size, np.float32) for size in (1, 1000, 1, 1000, 1, 20_000)]
    outputs = [np.empty(size * me.size, np.float32) for size in (1, 1000)]
    for call in range(1, count + 1):
        if call % 5:
            dist.all_reduce(arrays[call % 6], dist.ReduceOp.MAX)
        elif call % 10:
            dist.all_gather_into_tensor(outputs[1], arrays[1])
        else:
            work = dist.broadcast(arrays[1], src=call // 10 % me.size, async_op=True)
            assert work is not None
            work.wait()
        if not call % every:
            dist.barrier()
            found.append(held(call))
    dist.destroy_process_group()
    Path(f"{out}-{me.rank}").write_text(json.dumps(found))


def measure(what: str, count: int, points: int, medium: str) -> list[list[Held]]:
    """Return what each rank held at ``points`` times on the way."""
    folder = tempfile.mkdtemp(prefix="rankmesh-endurance-")
    try:
        out = f"{folder}/out"
        arguments = {"count": count, "every": count // points, "out": out}
        ours = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment = {
            **inherited, rank_server.MARKER: f"endurance-{os.getpid()}", "RANKMESH_TRANSPORT": medium,
            "RANKMESH_JOB": f"endurance-{os.getpid()}", "PYTHONPATH": PATHS,
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        errors = [f"{folder}/{rank}.err" for rank in range(SIZE)]
        program = Program(__file__, "tools.faults.endurance", what, folder, arguments)
        for path in errors:
            Path(path).touch()
        streams = [[os.devnull, errors[rank], errors[rank]] for rank in range(SIZE)]
        ranks = [rank_server.fork(program, rank, SIZE, environment, streams[rank]) for rank in range(SIZE)]
        codes = [rank.wait(_SECONDS) for rank in ranks]
        assert codes == [0] * SIZE, "\n".join(Path(path).read_text() for path in errors)
        return [[Held(*each) for each in json.loads(Path(f"{out}-{rank}").read_text())] for rank in range(SIZE)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def growth(found: Sequence[Held], allowed_kib: int = ALLOWED_KIB) -> list[str]:
    """Return what has grown since the first measurement."""
    first, last = found[0], found[-1]
    grown = [
        f"{name}: {getattr(first, name)} after {first.done}, {getattr(last, name)} after {last.done}"
        for name in ("descriptors", "threads")
        if getattr(last, name) > getattr(first, name)
    ]
    half = len(found) // 2  # the least of each, because the allocator keeps more at one time than at another
    before, after = (min(part, key=lambda each: each.kib) for part in (found[:half], found[half:]))
    if after.kib - before.kib > allowed_kib:
        grown.append(f"memory: {before.kib} KiB after {before.done}, {after.kib} KiB after {after.done}")
    return grown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if something has grown."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults.endurance", description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--points", type=int, default=20, help="measurements on the way")
    options = parser.parse_args(arguments)
    bad = False
    try:
        for what, count in ("cycles", options.cycles), ("collectives", options.collectives):
            for medium in ("shm", "tcp"):
                began = time.monotonic()
                found = measure(what, count, options.points, medium)
                print(f"{count} {what} over {medium}, {SIZE} ranks, {time.monotonic() - began:.0f} s", flush=True)
                for rank, each in enumerate(found):
                    for name in Held._fields[1:]:
                        print(f"  rank {rank} {name:12}", *(getattr(point, name) for point in each))
                    for text in growth(each):
                        bad = True
                        print(f"  rank {rank} GREW: {text}")
    finally:
        rank_server.close_all()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
