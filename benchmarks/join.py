"""How long a join takes, from before the first process starts until the last rank is ready.

``python -m benchmarks.join`` prints it.

Ranks are processes, started by RankMesh's launcher or by hand (``tcp://``, rank 0 hosts the gateway), or threads: then
there are no interpreters to start, and what is measured is the join itself.
"""

from __future__ import annotations

import argparse
import ast
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.options import number, progress
from benchmarks.run import Say
from benchmarks.tables import table
from benchmarks.team import PeerFailedError

RANK = Path(__file__).with_name("join_rank.py")
DEADLINE = 120.0
"""Seconds one start may take, and its end."""
STEPS = ("interpreter", "numpy", "rankmesh", "agent", "gateway", "peers", "group", "rest")
"""What a rank spends its time on, in this order; see Start."""
_OURS = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "PYTHONDONTWRITEBYTECODE")


class Start(NamedTuple):
    """One start of a world.

    Attributes:
        seconds: from before the first process (or thread) was started until the last rank was ready.
        steps: seconds of each step in the rank that was ready last, empty for threads: ``interpreter`` until the first
            line of its script, importing ``numpy``, ``rankmesh`` and the ``agent`` package, ``gateway`` to find it and
            wait until everyone has come, ``peers`` to connect to them, ``group`` to set up the world, and the ``rest``.
        processor: seconds of processor time that all the processes took until they had ended.
    """

    seconds: float
    steps: Mapping[str, float]
    processor: float


def launched(ranks: int, environment: Mapping[str, str] | None = None) -> Start:
    """Start ranks with RankMesh's launcher and return how long it took."""

    def start(_: int) -> list[tuple[list[str], dict[str, str]]]:
        return [([sys.executable, "-m", "rankmesh.run", f"--nproc-per-node={ranks}", str(RANK)], {})]

    return _processes(ranks, start, environment or {})


def by_hand(ranks: int, environment: Mapping[str, str] | None = None) -> Start:
    """Start ranks one by one with ``tcp://127.0.0.1:port`` and return how long it took."""

    def start(port: int) -> list[tuple[list[str], dict[str, str]]]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(RANK)]
        return [(command, {**place, "RANK": str(rank)}) for rank in range(ranks)]

    return _processes(ranks, start, environment or {})


def threads(ranks: int, environment: Mapping[str, str] | None = None) -> Start:
    """Have threads of this process join as ranks, each with an agent of its own, and return how long it took."""
    from rankmesh._rendezvous.hosted import HostedGateway
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.config.settings import Settings

    settings = replace(Settings.from_env({**clean_environment(), **(environment or {})}), job=f"join-{os.getpid()}")
    gateway = HostedGateway("127.0.0.1", 0, settings)
    agents: list[Agent] = []
    failures: list[BaseException] = []
    try:
        gateway.address.answers()  # the web framework is there; a launcher's gateway starts while its ranks do
        began, busy = time.monotonic(), time.process_time()

        def join(rank: int) -> None:
            try:
                agents.append(
                    Agent(
                        settings,
                        lambda: gateway.address.url,
                        rank=rank,
                        world_size=ranks,
                        host="127.0.0.1",
                        timeout=DEADLINE,
                    )
                )
            except BaseException as error:
                failures.append(error)

        joining = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()
        took, busy = time.monotonic() - began, time.process_time() - busy
    finally:
        closing = [threading.Thread(target=agent.close) for agent in agents]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        gateway.close(settings.job)
    if failures:
        raise PeerFailedError(f"{len(failures)} of {ranks} ranks failed to join: {failures[0]}") from failures[0]
    return Start(took, {}, busy)


WAYS: dict[str, Callable[..., Start]] = {"launcher": launched, "by hand": by_hand, "threads": threads}


def measure(
    ranks: Sequence[int],
    ways: Sequence[str],
    repetitions: int,
    environment: Mapping[str, str] | None = None,
    say: Say = lambda line: None,
) -> dict[tuple[str, int], list[Start]]:
    """Start worlds of several sizes in several ways, in turns, and return all starts by way and size.

    Raises:
        PeerFailedError: a world did not come together in time.
    """
    starts: dict[tuple[str, int], list[Start]] = {}
    for repetition in range(repetitions):
        say(f"joins: round {repetition + 1} of {repetitions}")
        for way in ways:
            for size in ranks:
                starts.setdefault((way, size), []).append(WAYS[way](size, environment))
    return starts


def report(starts: Mapping[tuple[str, int], Sequence[Start]]) -> str:
    """Return the medians as tables: of the whole, and of the steps in the last rank."""
    rows, steps = [], []
    for (way, size), each in starts.items():
        seconds = sorted(start.seconds for start in each)
        spread = f"{seconds[0]:.2f} - {seconds[-1]:.2f}"
        processor = median(start.processor for start in each)
        rows.append([way, str(size), f"{median(seconds):.2f}", spread, f"{processor:.2f}", f"{processor / size:.3f}"])
        if each[0].steps:
            steps.append([way, str(size), *(f"{1e3 * median(s.steps[step] for s in each):.0f}" for step in STEPS)])
    whole = table(["ranks are", "ranks", "ready, s", "least - most", "CPU, s", "CPU a rank, s"], rows, texts=1)
    if not steps:
        return whole
    return f"{whole}\n\n{table(['ranks are', 'ranks', *(f'{step}, ms' for step in STEPS)], steps, texts=1)}"


def _processes(
    ranks: int, start: Callable[[int], list[tuple[list[str], dict[str, str]]]], environment: Mapping[str, str]
) -> Start:
    with tempfile.TemporaryDirectory(prefix="rankmesh-join-") as folder, ExitStack() as cleanup:
        inbox = cleanup.enter_context(_inbox(Path(folder)))
        log = cleanup.enter_context(Path(folder, "output").open("w+b"))
        busy = _children_seconds()
        began = time.monotonic()
        shared = {
            **clean_environment(),
            **environment,
            "OMP_NUM_THREADS": "1",
            "JOIN_INBOX": str(Path(folder, "inbox")),
        }
        processes = [
            subprocess.Popen(
                command, env={**shared, **own, "JOIN_BEGAN": repr(time.monotonic())}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )
            for command, own in start(free_port())
        ]  # fmt: skip
        try:
            said = _read(inbox, ranks, processes)
            for process in processes:
                process.wait(DEADLINE)
        except (PeerFailedError, subprocess.TimeoutExpired) as error:
            log.seek(0)
            raise PeerFailedError(f"{error}\n{log.read().decode(errors='replace')[-4000:]}") from error
        finally:
            end(processes)
    last = max(said, key=lambda one: one["ready"])
    return Start(last["ready"] - began, last["steps"], _children_seconds() - busy)


@contextmanager
def _inbox(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(folder / "inbox"))
        inbox.settimeout(0.2)
        yield inbox


def _read(inbox: socket.socket, ranks: int, processes: Sequence[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    deadline = time.monotonic() + DEADLINE
    while len(said) < ranks:
        try:
            said.append(ast.literal_eval(inbox.recv(1 << 16).decode()))
        except TimeoutError:
            ended = [process.returncode for process in processes if process.poll()]
            if ended or time.monotonic() > deadline:
                raise PeerFailedError(f"{len(said)} of {ranks} ranks became ready; exit codes {ended}") from None
    return said


def end(processes: Sequence[subprocess.Popen[Any]], seconds: float = 15.0) -> None:
    """Terminate what still runs, so that launchers take their ranks with them, and kill what does not heed it."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def clean_environment() -> dict[str, str]:
    """The environment without what would send ranks elsewhere, or have them compile themselves at each start."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _children_seconds() -> float:
    used = os.times()
    return used.children_user + used.children_system


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line (None: this process's) says, print the tables and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.join", description=__doc__)
    parser.add_argument("--ranks", type=number, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["launcher", "by hand"])
    parser.add_argument("--repetitions", type=number, default=5)
    options = parser.parse_args(arguments)
    try:
        starts = measure(options.ranks, options.ways, options.repetitions, say=progress)
    except PeerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print(report(starts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
