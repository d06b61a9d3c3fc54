"""Steps of a job under attack: ``python -m benchmarks.starvation`` prints how many fewer it makes a second, by attack.

Two ranks train: a millisecond of arithmetic, then an all_reduce. Clients without the token attack all ports of
rank 0, and the gateway, which has the store. Windows with and without an attack take turns; the drop of a round
compares its window with those before and after, and the table has the medians of the rounds. Meanwhile a client with
the token sets a key of the store ten times a second. Clients run on cores of their own where there are some.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np

from benchmarks.attackers import A_SECOND, KINDS, attack, listening_ports, server_seconds, speaks_http
from benchmarks.workers import reserved_port
from rankmesh_agent.net.http_client import HttpClient

RANKS, ROUNDS, SECONDS, TIMEOUT = 2, 7, 2.0, 60.0
_SETTLE_SECONDS = 0.3
_PROBE_SECONDS = 0.1
_ELEMENTS = 100_000


class Drop(NamedTuple):
    """Figures of one kind of attack.

    Attributes:
        kind: the attack.
        steps: steps a second of the windows without it, the median.
        drops: by round, the part of the steps that is missing.
        microseconds: of a processor, which a connection costs the threads of rank 0's servers, the median.
        longest: seconds of the longest request of the client with the token.
    """

    kind: str
    steps: float
    drops: list[float]
    microseconds: float
    longest: float


class Cores(NamedTuple):
    """The cores of the ranks, and those of the clients; the same ones where there are too few."""

    ranks: list[int]
    clients: list[int]

    @classmethod
    def of_this_machine(cls) -> Cores:
        """Return the first cores for the ranks, the rest for the clients."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(cores[:RANKS], cores[RANKS:]) if len(cores) > RANKS else cls(cores, cores)


def measure(
    kinds: Sequence[str], rounds: int = ROUNDS, seconds: float = SECONDS, a_second: int = A_SECOND
) -> list[Drop]:
    """Attack a job in these ways, in turn.

    Raises:
        AssertionError: a rank failed, or a request of the client with the token.
    """
    cores, token = Cores.of_this_machine(), secrets.token_hex(16)
    with _job(token, cores.ranks) as job:
        found: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in kinds}
        before = job.steps_a_second(seconds)
        for _ in range(rounds):
            for kind in kinds:
                used = server_seconds(job.pid)
                with _attackers(kind, job, a_second) as connections, _probe(job.url, token) as longest:
                    during = job.steps_a_second(seconds)
                cost = (server_seconds(job.pid) - used) / connections()
                after = job.steps_a_second(seconds)
                found[kind].append(((before + after) / 2, during, 1e6 * cost, longest()))
                before = after
    return [
        Drop(
            kind,
            statistics.median(free for free, *_ in each),
            [1 - during / free for free, during, *_ in each],
            statistics.median(cost for _, _, cost, _ in each),
            max(waited for *_, waited in each),
        )
        for kind, each in found.items()
    ]


class _Job:
    """A job that trains in other processes.

    Args:
        gateway: port of the gateway, a process of its own.
        pid: rank 0's process.
        steps: the number of steps, in shared memory.
    """

    def __init__(self, gateway: int, pid: int, steps: Any) -> None:
        self.pid = pid
        (agent,) = (port for port in listening_ports(pid) if speaks_http(port, TIMEOUT))
        self.ports, self.http_ports = [*listening_ports(pid), gateway], [agent, gateway]
        self.url = f"http://127.0.0.1:{agent}"
        self._steps = steps

    def steps_a_second(self, seconds: float) -> float:
        """Return the steps a second of a window that begins when the last one's attack is over."""
        time.sleep(_SETTLE_SECONDS)
        began, before = time.monotonic(), self._steps.value
        time.sleep(seconds)
        while not (made := self._steps.value - before):
            assert time.monotonic() - began < TIMEOUT, "the job has come to a halt"
            time.sleep(0.01)
        return float(made / (time.monotonic() - began))


@contextlib.contextmanager
def _job(token: str, cores: Sequence[int]) -> Iterator[_Job]:
    context = multiprocessing.get_context("fork")
    steps, began, stop = context.RawValue("Q"), context.Event(), context.Event()
    with reserved_port() as port:
        ranks = [
            context.Process(target=_train, args=(rank, port, token, cores, steps, began, stop)) for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()  # with the reserved port open, as all that is open here
    try:
        assert began.wait(TIMEOUT), "the job does not begin"
        yield _Job(port, ranks[0].pid or 0, steps)
        assert all(rank.exitcode is None for rank in ranks), "a rank has failed"
    finally:
        stop.set()
        for rank in ranks:
            rank.join(TIMEOUT)
            rank.kill()
    assert all(rank.exitcode == 0 for rank in ranks), "a rank has failed"


def _train(number: int, port: int, token: str, cores: Sequence[int], steps: Any, began: Any, stop: Any) -> None:
    """Be a rank: it makes steps until it is stopped."""
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.environ.update(RANKMESH_TOKEN=token, RANKMESH_TRANSPORT="tcp")
    import rankmesh as dist

    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=RANKS)
    gradient, end = np.random.default_rng(number).random(_ELEMENTS), np.zeros(1)
    if number == 0:
        began.set()
    while not end[0]:
        np.sin(gradient, out=gradient)  # on one core, which a matrix product would leave
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        end[0] = stop.is_set()
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        steps.value += number == 0
    dist.destroy_process_group()


@contextlib.contextmanager
def _attackers(kind: str, job: _Job, a_second: int) -> Iterator[Callable[[], int]]:
    """Attack a job from another process; yields a function that returns the number of connections afterwards."""
    context = multiprocessing.get_context("fork")
    over, made = context.Event(), context.RawValue("Q")
    ports = job.http_ports if KINDS[kind].http_only else job.ports

    def run() -> None:
        os.sched_setaffinity(0, Cores.of_this_machine().clients)
        attack(KINDS[kind], ports, over.is_set, a_second, made=made)

    process = context.Process(target=run, daemon=True)
    process.start()
    deadline = time.monotonic() + TIMEOUT
    while not made.value:
        assert time.monotonic() < deadline, "the attack does not begin"
        time.sleep(0.001)
    yield lambda: made.value
    over.set()
    process.join(TIMEOUT)


@contextlib.contextmanager
def _probe(url: str, token: str) -> Iterator[Callable[[], float]]:
    """Set a key again and again, over HTTP; yields a function that returns the seconds of the longest request."""
    over, waits, failures = threading.Event(), [0.0], list[BaseException]()

    def run() -> None:
        with contextlib.closing(HttpClient(token)) as client:
            while not over.wait(_PROBE_SECONDS):
                began = time.monotonic()
                try:
                    response = client.request("PUT", f"{url}/v1/store/key", content=b"value", timeout=TIMEOUT)
                    assert response.status == HTTPStatus.NO_CONTENT, response
                except Exception as error:
                    failures.append(error)
                waits.append(time.monotonic() - began)

    thread = threading.Thread(target=run)
    thread.start()
    yield lambda: max(waits)
    over.set()
    thread.join(TIMEOUT)
    assert not failures, failures


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starvation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a window")
    parser.add_argument("--rate", type=int, default=A_SECOND, help="connections a second")
    parser.add_argument("kinds", nargs="*", help=f"attacks, of {', '.join(KINDS)}; all if left out")
    chosen = parser.parse_args(arguments)
    cores = Cores.of_this_machine()
    shared = "which is not apart: the drops include the clients' own work" if cores.ranks == cores.clients else "apart"
    print(f"{socket.gethostname()}: ranks on cores {cores.ranks}, clients on {cores.clients}, {shared}")
    print(f"{chosen.rate} connections a second; medians of {chosen.rounds} rounds of {chosen.seconds:g} s\n")
    print("| attack | steps a second without | drop | worst | a connection, rank 0's servers | longest token-holder |")
    print("|---|--:|--:|--:|--:|--:|")
    for found in measure(chosen.kinds or list(KINDS), chosen.rounds, chosen.seconds, chosen.rate):
        print(
            f"| {found.kind} | {found.steps:.0f} | {statistics.median(found.drops):.1%} | {max(found.drops):.1%} "
            f"| {found.microseconds:.0f} µs | {1e3 * found.longest:.0f} ms |"
        )


if __name__ == "__main__":
    main()
