"""One world of many real ranks on this machine: ``python -m benchmarks.many`` prints seconds, descriptors and memory.

The ranks are forks of a process that has imported the library: the import, which most of the time of so many processes
would go to, is paid once and not timed. Open MPI's ranks are started by mpirun. The gateway is a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import table
from benchmarks.implementations import MPIRUN
from benchmarks.workers import CHECKOUT, MeasurementError, reserved_port

RANKS, DEADLINE = 128, 120.0
MIB = 1 << 20
_FIRST = ("numpy", "encodings.idna", "rankmesh._face", "rankmesh._session.agents", "rankmesh_agent.agent")
MODULES = _FIRST + tuple(f"rankmesh_agent.backends.{name}" for name in ("cpu", "segment_setup"))
GLOO_MODULES = ("torch.distributed",)
CALLS = {"barrier": 5, "all_reduce 4 B": 5, "all_reduce 1 MiB": 2}
ROUNDS = 3
IMPLEMENTATIONS = ("rankmesh-shm", "rankmesh-tcp", "gloo", "mpi")
COLUMNS = ("start", *CALLS, "new_group", "destroy")
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+) +/dev/shm/", re.M)

Call = Callable[[], Any]
Interval = tuple[float, float]


class World(NamedTuple):
    """The calls of a rank, whatever the library: ``new_group`` makes a group of the first half, and uses it once."""

    calls: Mapping[str, Call]
    new_group: Call
    leave: Call


class Report(NamedTuple):
    """What a rank reports.

    Attributes:
        seconds: by step, when it began and ended, by the monotonic clock; those of calls are of one call, on average.
        descriptors: open descriptors at the end, before it left.
        shared: bytes of the files in /dev/shm that it has mapped, by inode.
        resident: bytes of resident memory.
    """

    seconds: dict[str, list[Interval]]
    descriptors: int
    shared: dict[str, int]
    resident: int


class Figures(NamedTuple):
    """A world's figures: seconds by step, the slowest rank's; the most descriptors and resident bytes of a rank."""

    seconds: dict[str, float]
    descriptors: int
    shared: int
    resident: int


def measure(name: str, ranks: int, descriptors: int | None = None, deadline: float = DEADLINE) -> Figures:
    """Run a world and return its figures.

    Args:
        name: one of IMPLEMENTATIONS.
        ranks: number of ranks.
        descriptors: limit of open descriptors of each rank, None for the system's.
        deadline: time limit of the world in seconds.

    Raises:
        MeasurementError: a rank failed, or the time was over; with the last words of the ranks.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankmesh-many-")))
        if name == "mpi":
            began = _mpirun(folder, ranks, descriptors, deadline)
        else:
            began = _fork(stack, name, folder, ranks, descriptors, deadline)
        reports = [Report(*json.loads(path.read_text())) for path in folder.glob("*.report")]
        if len(reports) < ranks:
            output = folder / "output"
            lines = output.read_text(errors="replace").splitlines()[-12:] if output.exists() else []
            raise MeasurementError(
                "\n".join([f"{name}: {ranks - len(reports)} of {ranks} ranks failed in {deadline:g} s", *lines])
            )
    shared = {inode: size for report in reports for inode, size in report.shared.items()}
    return Figures(
        {step: _slowest(reports, step, began) for step in COLUMNS},
        max(report.descriptors for report in reports),
        sum(shared.values()),
        max(report.resident for report in reports),
    )


def _slowest(reports: Sequence[Report], step: str, began: float) -> float:
    """Return the seconds of a step: until the last rank had finished it, the median of its rounds."""
    rounds: list[tuple[Interval, ...]] = list(zip(*(report.seconds[step] for report in reports), strict=True))
    if step in CALLS:
        return statistics.median(max(end - begin for begin, end in each) for each in rounds)
    return max(end for _, end in rounds[0]) - (began if step == "start" else max(begin for begin, _ in rounds[0]))


def _fork(stack: ExitStack, name: str, folder: Path, ranks: int, descriptors: int | None, deadline: float) -> float:
    """Fork the ranks, start all at the same time, and wait for their ends; return when they started."""
    port = stack.enter_context(reserved_port())
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    if name != "gloo":
        environment |= {"RANKMESH_TRANSPORT": name.removeprefix("rankmesh-"), "RANKMESH_GATEWAY": _gateway(stack, port)}
    reading, writing = os.pipe()
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    forker = os.fork()
    if forker == 0:  # imports, so that this process does not
        os.setsid()
        os.dup2(reading, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)  # not that of a test
        logging.root.handlers.clear()
        os.environ.update(environment)
        _run_forks(name, folder, ranks, descriptors)
    os.close(reading)
    os.close(output)
    until = time.monotonic() + deadline
    while len(list(folder.glob("*.forked"))) < ranks and time.monotonic() < until:
        time.sleep(0.02)
    began = time.monotonic()
    os.close(writing)
    while os.waitpid(forker, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.killpg(forker, signal.SIGKILL)
        time.sleep(0.02)
    return began


def _run_forks(name: str, folder: Path, ranks: int, descriptors: int | None) -> None:
    """Import the library, fork the ranks, wait for them and exit."""
    status = 1
    try:
        _import(name)
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _be(name, rank, folder, descriptors)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _be(name: str, rank: int, folder: Path, descriptors: int | None) -> None:
    """Be a rank: wait until all exist and standard input ends, do the steps, report and exit."""
    status = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        (folder / f"{rank}.forked").touch()
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        os.read(0, 1)
        _write(folder, rank, steps(JOIN[name]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _import(name: str) -> None:
    for module in GLOO_MODULES if name == "gloo" else MODULES:
        importlib.import_module(module)


@contextmanager
def _timed(seconds: list[Interval], calls: int = 1) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds.append((began, began + (time.monotonic() - began) / calls))


def steps(join: Callable[[], World]) -> Report:
    """Do all steps as a rank, and return its report."""
    seconds: dict[str, list[Interval]] = {step: [] for step in COLUMNS}
    with _timed(seconds["start"]):
        world = join()
    for name, calls in CALLS.items():
        for _ in range(ROUNDS):
            world.calls["barrier"]()
            with _timed(seconds[name], calls):
                for _ in range(calls):
                    world.calls[name]()
    world.calls["barrier"]()
    with _timed(seconds["new_group"]):
        world.new_group()
    world.calls["barrier"]()
    maps = Path("/proc/self/maps").read_text()
    shared: dict[str, int] = {}
    for begin, end, _, inode in _MAPPED.findall(maps):
        shared[inode] = shared.get(inode, 0) + int(end, 16) - int(begin, 16)
    resident = int(re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1])  # type: ignore[index]
    descriptors = len(os.listdir("/proc/self/fd")) - 1
    world.calls["barrier"]()
    with _timed(seconds["destroy"]):
        world.leave()
    return Report(seconds, descriptors, shared, 1024 * resident)


def _join_rankmesh() -> World:
    import numpy as np

    import rankmesh as dist

    dist.init_process_group()
    small, large = np.zeros(1, np.float32), np.zeros(MIB // 4, np.float32)

    def new_group() -> None:
        group = dist.new_group(range(dist.get_world_size() // 2))
        if dist.get_rank() < dist.get_world_size() // 2:
            dist.all_reduce(small, group=group)

    return World(_calls(dist, small, large), new_group, dist.destroy_process_group)


def _join_gloo() -> World:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    small, large = torch.zeros(1), torch.zeros(MIB // 4)

    def new_group() -> None:
        group = dist.new_group(list(range(dist.get_world_size() // 2)))
        if dist.get_rank() < dist.get_world_size() // 2:
            dist.all_reduce(small, group=group)

    return World(_calls(dist, small, large), new_group, dist.destroy_process_group)


def _calls(dist: Any, small: Any, large: Any) -> Mapping[str, Call]:
    return {
        "barrier": dist.barrier,
        "all_reduce 4 B": lambda: dist.all_reduce(small),
        "all_reduce 1 MiB": lambda: dist.all_reduce(large),
    }


def _join_mpi() -> World:
    from array import array

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    small, large = array("f", [0.0]), array("f", [0.0]) * (MIB // 4)
    calls = {
        "barrier": comm.Barrier,
        "all_reduce 4 B": lambda: comm.Allreduce(MPI.IN_PLACE, small),
        "all_reduce 1 MiB": lambda: comm.Allreduce(MPI.IN_PLACE, large),
    }

    def new_group() -> None:
        half = comm.Split(int(comm.rank < comm.size // 2), comm.rank)
        if comm.rank < comm.size // 2:
            half.Allreduce(MPI.IN_PLACE, small)

    return World(calls, new_group, MPI.Finalize)


JOIN: dict[str, Callable[[], World]] = {
    "rankmesh-shm": _join_rankmesh,
    "rankmesh-tcp": _join_rankmesh,
    "gloo": _join_gloo,
    "mpi": _join_mpi,
}


def _mpirun(folder: Path, ranks: int, descriptors: int | None, deadline: float) -> float:
    """Run the ranks of Open MPI; return when mpirun started."""
    words = [word.format(ranks=ranks) for word in MPIRUN]
    command = [*words, "-m", "benchmarks.many", "--rank-of-mpi", str(folder)]

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    began = time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=limit
        )
        try:
            process.wait(deadline)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks
            process.wait()
    return began


def _write(folder: Path, rank: int, report: Report) -> None:
    new = folder / f"{rank}.new"
    new.write_text(json.dumps(report))
    new.rename(folder / f"{rank}.report")


def _gateway(stack: ExitStack, port: int) -> str:
    """Start a gateway, and return its URL."""
    command = [sys.executable, "-m", "rankmesh_gateway", "--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait, 10)
    stack.callback(process.terminate)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    if found is None:
        raise MeasurementError("the gateway did not start")
    return found[0]


def row(name: str, figures: Figures) -> list[str]:
    """Return a world's figures as a row of the table."""
    seconds = [f"{figures.seconds[step]:.3g}" for step in COLUMNS]
    return [name, *seconds, str(figures.descriptors), f"{figures.shared / MIB:.1f}", f"{figures.resident / MIB:.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many", description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--peers", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--descriptors", type=int, help="limit of open descriptors of each rank: ulimit -n")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for each world")
    parser.add_argument("--rank-of-mpi", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of_mpi is not None:
        _write(options.rank_of_mpi, os.getpid(), steps(_join_mpi))
        return
    rows, failed = [], []
    for name in options.peers:
        try:
            rows.append(row(name, measure(name, options.ranks, options.descriptors, options.deadline)))
        except MeasurementError as error:
            failed.append(str(error))
    headings = [f"{options.ranks} ranks: s", *COLUMNS, "descriptors", "/dev/shm MiB", "RSS MiB"]
    print(table(headings, rows, texts=1))
    for each in failed:
        print(each)


if __name__ == "__main__":
    main()
