"""The program of the stores: a process that serves one and processes that ask it, over loopback.

    python -m benchmarks.store LIBRARY SOCKET

The processes are forked from one that has imported the library, which is much faster than 33 imports of torch. All
clients are there from the beginning; those that have nothing to do sleep.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.channel import Channel
from benchmarks.rank import LIFETIME, timed
from benchmarks.team import RANKS_VARIABLE
from benchmarks.worlds import Call

KEYS = [f"key/{number}" for number in range(100)]
VALUE = b"v" * 64
TIMEOUT = timedelta(seconds=60)


class Library(NamedTuple):
    """A library with a TCPStore.

    Attributes:
        store: its class.
        version: in words.
    """

    store: Callable[..., Any]
    version: str


def rankmesh() -> Library:
    import rankmesh as dist

    return Library(dist.TCPStore, f"RankMesh {dist.__version__}")


def torch() -> Library:
    import torch
    import torch.distributed as dist

    return Library(dist.TCPStore, f"TCPStore of torch {torch.__version__}")


LIBRARIES: dict[str, Callable[[], Library]] = {"rankmesh-store": rankmesh, "torch-store": torch}


def calls_of(store: Any, number: int) -> dict[str, Call]:
    """Return what a client can be told to do; the names are those in ``benchmarks.stores``."""
    own = f"client/{number}"
    return {
        "store_set": lambda: store.set(own, VALUE),
        "store_get": lambda: store.get(KEYS[0]),
        "store_add": lambda: store.add(f"{own}/count", 1),
        "store_multi_get": lambda: store.multi_get(KEYS),
    }


def timings(call: Call, calls: int, repetitions: int) -> list[float]:
    """Return the seconds a call takes, for each repetition of so many calls."""
    timed(call, calls // 10)
    return [timed(call, calls) / calls for _ in range(repetitions)]


def check(store: Any, number: int) -> None:
    """Find out whether the store keeps what it is given.

    Raises:
        ArithmeticError: it does not.
    """
    counted = f"client/{number}/checked"
    before = store.add(counted, 0)
    store.set(f"client/{number}", VALUE)
    got = [store.get(f"client/{number}"), *store.multi_get(KEYS)]
    if any(value != VALUE for value in got) or len(got) != 1 + len(KEYS) or store.add(counted, 2) != before + 2:
        raise ArithmeticError(f"client {number}: the store does not have what was put there")


def crowded(call: Call, seconds: float) -> float:
    """Return the seconds a call takes while everybody calls for so many seconds."""
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call()
        calls += 1
    return (time.perf_counter() - began) / calls


def serve(library: Library, say_port: Connection, end: Connection) -> None:
    """Serve a store with the keys in it until the other end of a pipe is closed."""
    signal.alarm(LIFETIME)
    store = library.store("127.0.0.1", 0, None, True, TIMEOUT, False)
    for key in KEYS:
        store.set(key, VALUE)
    say_port.send(store.port)
    end.poll(None)


def obey(library: Library, number: int, clients: int, port: int, path: Path) -> None:
    """Be a client and obey until the benchmark closes the socket."""
    signal.alarm(LIFETIME)
    store = library.store("127.0.0.1", port, None, False, TIMEOUT, False)
    calls = calls_of(store, number)
    channel = Channel.connect(path)
    channel.send({"rank": number, "size": clients, "version": library.version})
    while (order := channel.receive()) is not None:
        check(store, number)
        if order["operation"] == "store_crowd":
            seconds = [crowded(calls["store_add"], order["calls"])]
        elif number == 0:
            seconds = timings(calls[order["operation"]], order["calls"], order["repetitions"])
            check(store, number)
        else:
            seconds = [0.0] * order["repetitions"]
        channel.send({"seconds": seconds})


def main(name: str, path: str) -> None:
    """Start everything and wait for the clients to end."""
    signal.alarm(LIFETIME)
    library = LIBRARIES[name]()
    processes = multiprocessing.get_context("fork")
    hear_port, say_port = processes.Pipe(duplex=False)
    ended, end = processes.Pipe(duplex=False)
    server = processes.Process(target=_serve_alone, args=(library, say_port, ended, end), daemon=True)
    server.start()
    port = hear_port.recv()
    number = int(os.environ[RANKS_VARIABLE])
    clients = [processes.Process(target=obey, args=(library, n, number, port, Path(path))) for n in range(number)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    end.close()
    server.join(5)


def _serve_alone(library: Library, say_port: Connection, ended: Connection, end: Connection) -> None:
    end.close()  # the parent's end, of which the fork made a copy
    serve(library, say_port, ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
