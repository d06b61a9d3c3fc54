"""Many clients of one TCPStore: ``python -m benchmarks.clients`` prints the cost of connecting, and of waking all.

The clients are threads of a few processes. All connect at the same time; then all wait for one key, which the master
sets.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from rankmesh import TCPStore

CLIENTS, PROCESSES, TIMEOUT = 1000, 8, 60.0
_SETTLE_SECONDS = 1.0


class Figures(NamedTuple):
    """Seconds until the last client was in, and woken; processor seconds of the master meanwhile."""

    connected: float
    connect_cpu: float
    woken: float
    wake_cpu: float


def measure(clients: int, processes: int = PROCESSES) -> Figures:
    """Connect so many clients to a master in this process, and wake them.

    Raises:
        AssertionError: a client failed.
    """
    context = multiprocessing.get_context("fork")
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(processes)]
    started = [
        context.Process(target=_clients, args=(master.port, clients // processes, theirs)) for _, theirs in pipes
    ]
    for process in started:
        process.start()
    ours = [each for each, _ in pipes]
    assert _receive(ours) == ["ready"] * processes
    began, used = time.monotonic(), time.process_time()
    _send(ours, "connect")
    assert _receive(ours) == ["connected"] * processes
    connected, connect_cpu = time.monotonic() - began, time.process_time() - used
    _send(ours, "wait")
    time.sleep(_SETTLE_SECONDS)
    began, used = time.monotonic(), time.process_time()
    master.set("key", "value")
    assert _receive(ours) == ["woken"] * processes
    woken, wake_cpu = time.monotonic() - began, time.process_time() - used
    _send(ours, "end")
    for process in started:
        process.join()
    master.close()
    return Figures(connected, connect_cpu, woken, wake_cpu)


def _clients(port: int, count: int, pipe: Connection) -> None:
    """Be ``count`` clients, as the master directs."""
    stores: list[TCPStore] = []
    woken: list[TCPStore] = []

    def connect(_: int) -> None:
        stores.append(TCPStore("127.0.0.1", port, timeout=TIMEOUT, wait_for_workers=False))

    def wait(number: int) -> None:
        stores[number].wait(["key"], TIMEOUT)
        woken.append(stores[number])

    pipe.send("ready")
    for call, done, text in ((connect, stores, "connected"), (wait, woken, "woken")):
        pipe.recv()
        threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send(text if len(done) == count else "failed")
    pipe.recv()


def _send(pipes: Sequence[Connection], order: str) -> None:
    for pipe in pipes:
        pipe.send(order)


def _receive(pipes: Sequence[Connection]) -> list[str]:
    return [pipe.recv() if pipe.poll(TIMEOUT) else "late" for pipe in pipes]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    found = measure(parser.parse_args(arguments).clients)
    print(f"all connected after {found.connected:.2f} s; the master took {found.connect_cpu:.2f} s of a processor")
    print(f"all woken after {1e3 * found.woken:.0f} ms; the master took {1e3 * found.wake_cpu:.0f} ms of a processor")


if __name__ == "__main__":
    main()
