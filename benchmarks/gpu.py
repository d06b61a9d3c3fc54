"""all_reduce of arrays on GPUs: over NCCL beside NCCL's bare calls, over CUDA IPC beside host memory and a copy."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers import RANKMESH, Peer
from benchmarks.plan import KIB, MIB, Case, Cell, Effort
from benchmarks.results import Results
from benchmarks.run import Rounds, Say
from benchmarks.tables import size
from benchmarks.team import Team

SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
MOST_OVER_NCCL = 256 * MIB
RANKS = (2, 4)
"""How many share a GPU."""
CHECKED_CALLS, CHECKED_BYTES = 1000, MIB

NCCL, IPC, STAGED, COPY = (
    Peer(name, title, title, library, "cupy", RANKMESH, program="benchmarks.gpu_rank")
    for name, title, library in (
        ("rankmesh-nccl", "RankMesh over NCCL", "nccl"),
        ("rankmesh-ipc", "RankMesh over CUDA IPC", "ipc"),
        ("rankmesh-staged", "RankMesh through host memory", "staged"),
        ("gpu-copy", "a copy on the GPU", "copy"),  # by a single process
    )
)
BARE = "bare-nccl"
"""Called in the ranks of NCCL."""
PARTS = ("gpu_enqueue", "gpu_done")
"""Of a call over NCCL: the host's part, and all of it."""
ALL_REDUCE = "gpu_all_reduce"
GREW = ("gpu_pool_grew", "gpu_device_grew")
"""Bytes that the checked calls took and did not give back: of CuPy's pool, and of what the device has free."""
_COPIES = 6
"""Arrays that a rank of each peer, together, may need room for."""


class Plan(NamedTuple):
    """How many turns each peer gets at most, how many ranks share a GPU, and bytes of the array."""

    rounds: int
    ranks: Sequence[int] = RANKS
    sizes: Sequence[int] = SIZES


def missing() -> list[str]:
    """Return a line that says why there is nothing to measure here, and what to do; none if there is a GPU."""
    from rankmesh_agent.device import runtime as cuda

    why = cuda.unavailable_reason()
    return [f"There is nothing to measure on GPUs: {why}."] if why else []


def describe() -> dict[str, str]:
    """Return what a reader needs to know of the GPUs and of what drives them."""
    import cupy
    from cupy.cuda import nccl, runtime

    names = [runtime.getDeviceProperties(number)["name"].decode() for number in range(runtime.getDeviceCount())]
    module = Path("/proc/driver/nvidia/version")
    driver = re.search(r" (\d+\.[\d.]+) ", module.read_text()) if module.exists() else None
    versions = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    cuda = [f"{version // 1000}.{version % 1000 // 10}" for version in versions]
    version = nccl.get_version() if nccl.available else 0
    return {
        "GPU": ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)),
        "driver": driver[1] if driver else "not told",
        "CUDA": f"{cuda[0]} of the driver, {cuda[1]} of CuPy",
        "CuPy": cupy.__version__,
        "NCCL": f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else "none",
    }


def measure(plan: Plan, results: Results, say: Say) -> list[str]:
    """Measure all of it, add it to the results, and return a line for each part that cannot be measured here.

    Raises:
        PeerFailedError: a peer did not start, died, added up wrongly or took too long.
    """
    from cupy.cuda import runtime

    from rankmesh_agent.device import runtime as cuda

    no_nccl = cuda.nccl_unavailable_reason()
    left_out = [f"{NCCL.title} is left out: {no_nccl}."] if no_nccl else []
    if not no_nccl:
        _over_nccl(plan, runtime.getDeviceCount(), results, say)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    room = min(runtime.getDeviceProperties(0)["totalGlobalMem"], host)
    for ranks in plan.ranks:
        fitting = [nbytes for nbytes in plan.sizes if nbytes * ranks * _COPIES <= room]
        left_out += [f"{size(n)} with {ranks} ranks is left out: no room." for n in plan.sizes if n not in fitting]
        left_out += _on_one_gpu(plan, ranks, fitting, results, say)
    for line in left_out:
        say(line)
    return left_out


def _over_nccl(plan: Plan, ranks: int, results: Results, say: Say) -> None:
    """Measure a rank a GPU, each of which calls NCCL itself in turn."""
    say(f"{NCCL.title}, with a GPU for each of {ranks}: starting")
    with Team(NCCL, ranks) as team:
        results.versions[NCCL.name] = team.version
        _check(team, results, say)
        for number in range(plan.rounds):
            say(f"{NCCL.title}: round {number + 1} of {plan.rounds}")
            for nbytes in plan.sizes:
                if nbytes <= MOST_OVER_NCCL:
                    _turn(team, nbytes, 100 if nbytes <= MIB else 10, results)


def _turn(team: Team, nbytes: int, calls: int, results: Results) -> None:
    by_rank = team.ask("gpu_nccl", nbytes, calls, 4)
    slowest = [[max(each) for each in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]
    cells = [Cell(Case(part, team.ranks, nbytes), peer) for peer in (NCCL.name, BARE) for part in PARTS]
    for cell, seconds in zip(cells, zip(*slowest, strict=True), strict=True):
        results.add(cell, [1e6 * second for second in seconds], calls)


def _on_one_gpu(plan: Plan, ranks: int, sizes: Sequence[int], results: Results, say: Say) -> list[str]:
    """Measure ranks that share a GPU; return a line if CUDA IPC is not to be had."""
    say(f"{ranks} ranks on one GPU: starting {', '.join(peer.title for peer in (IPC, STAGED, COPY))}")
    with ExitStack() as stack:
        teams = [stack.enter_context(Team(peer, 1 if peer is COPY else ranks)) for peer in (IPC, STAGED, COPY)]
        if "cuda:cuda-ipc" not in teams[0].version:
            return [f"{IPC.title}, {ranks} ranks, is left out: what came instead is {teams[0].version}."]
        results.versions |= {team.peer.name: team.version for team in teams}
        for team in teams[:2]:
            _check(team, results, say)
        effort = Effort(plan.rounds, least=min(3, plan.rounds), budget=10.0, repetitions=2, most_calls=200)
        if sizes:
            Rounds(teams, {Case(ALL_REDUCE, ranks, nbytes): effort for nbytes in sizes}, results).measure(say)
    return []


def _check(team: Team, results: Results, say: Say) -> None:
    """Have a team's ranks compare results with CuPy's, and keep what memory that took."""
    say(f"{team.peer.title}, {team.ranks} ranks: {CHECKED_CALLS} calls are checked")
    (by_rank,) = zip(*team.ask("gpu_check", CHECKED_BYTES, CHECKED_CALLS, 1), strict=True)
    for part, grew in zip(GREW, zip(*by_rank, strict=True), strict=True):
        results.add(Cell(Case(part, team.ranks, CHECKED_BYTES), team.peer.name), [max(grew)], CHECKED_CALLS)
