"""What backend "mpi" adds to bare mpi4py: both make the same call in the same processes, in turns.

``python -m benchmarks.mpi_overhead ROUNDS`` is what each rank runs; rank 0 prints the timings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.peers import MPIRUN, Peer
from benchmarks.plan import KIB, MIB, Case, Cell
from benchmarks.results import Results
from benchmarks.run import Say
from benchmarks.team import PeerFailedError

RANKS = 2
SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
BARE, OURS = "mpi4py", "rankmesh-mpi"
PEER = Peer("mpi-overhead", "Backend mpi beside bare mpi4py", "mpi", "mpi", "mpi4py", (*MPIRUN, sys.executable))
_SECONDS = 0.03
"""Of one timing."""
_LIMIT = 300.0


def case(nbytes: int) -> Case:
    """Return the case of an array of so many bytes."""
    return Case("mpi_all_reduce", RANKS, nbytes)


def measure(rounds: int, results: Results, say: Say) -> None:
    """Measure all_reduce of float32 in place.

    Args:
        rounds: how often each has its turn.
        results: what to add the figures to.
        say: takes a line of progress.

    Raises:
        PeerFailedError: the ranks failed.
    """
    say(f"{RANKS} ranks: backend mpi and bare mpi4py in turns")
    done = subprocess.run(
        PEER.command(RANKS, "-m", __name__, str(rounds)), capture_output=True, text=True, timeout=_LIMIT, check=False
    )
    if done.returncode:
        raise PeerFailedError(f"{PEER.title}: {done.stderr}")
    told = json.loads(done.stdout)
    results.versions.update({BARE: told["version"], OURS: told["version"]})
    for nbytes, calls, turns in told["figures"]:
        for bare, ours in turns:
            results.add(Cell(case(nbytes), BARE), [bare], calls)
            results.add(Cell(case(nbytes), OURS), [ours], calls)


def rank(rounds: int) -> None:
    """Measure as one rank."""
    import numpy as np
    from mpi4py import MPI

    import rankmesh as dist

    dist.init_process_group("mpi")
    comm = MPI.COMM_WORLD
    figures = []
    for nbytes in SIZES:
        array = np.zeros(max(1, nbytes // 4), np.float32)  # zeros stay zeros, however often they are added

        def bare(array: object = array) -> None:
            comm.Allreduce(MPI.IN_PLACE, array)

        def ours(array: object = array) -> None:
            dist.all_reduce(array)

        once = comm.allreduce(max(_seconds(call, 5, comm.Barrier) for call in (bare, ours)), MPI.MAX)
        calls = max(3, int(_SECONDS / once))
        turns = [[1e6 * _seconds(call, calls, comm.Barrier) for call in (bare, ours)] for _ in range(rounds)]
        slowest = np.array(turns)
        comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        figures.append([nbytes, calls, slowest.tolist()])
    if comm.rank == 0:
        print(json.dumps({"version": MPI.Get_library_version().split(",")[0], "figures": figures}))
    dist.destroy_process_group()


def _seconds(call: Callable[[], None], calls: int, meet: Callable[[], None]) -> float:
    meet()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    rank(int(sys.argv[1]))
