"""Where the calls of NCCL's ranks meet: what matches is worked out."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict, deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any, NamedTuple, cast

import numpy as np

_INVALID_USAGE = 5


class Call(NamedTuple):
    """What has to be equal at all ranks, but for send and recv.

    Attributes:
        peer: the other rank, or the root.
    """

    kind: str
    count: int  # type: ignore[assignment]  # of tuple, which nothing calls
    dtype: np.dtype[Any]
    op: int
    peer: int


class _Batch:
    """Calls that a rank made in a group: it goes on when all have their results.

    Attributes:
        here: whether the rank is of this process, which may end as soon as it has its results.
    """

    def __init__(self, connection: Connection, here: bool, calls: list[tuple[Call, bytes]]) -> None:
        self.connection = connection
        self.here = here
        self.results: list[bytes | None] = [None] * len(calls)
        self.missing = len(calls)

    def answer(self, index: int, result: bytes | None) -> None:
        self.results[index] = result
        self.missing -= 1
        if not self.missing:
            with contextlib.suppress(OSError):  # a dead rank
                self.connection.send(self.results)


class _Given(NamedTuple):
    call: Call
    data: bytes
    batch: _Batch
    place: int


def serve(listener: Listener) -> None:
    """Let ranks meet, then carry out their calls until all have gone."""
    ranks: dict[int, tuple[Connection, bool]] = {}
    places: list[Any] = []
    size = 1
    with listener:
        while len(places) < size:
            try:
                connection = listener.accept()
                rank, size, pid, place = connection.recv()
            except (OSError, EOFError, AuthenticationError):
                continue
            ranks[rank] = connection, pid == os.getpid()
            places.append(place)
    status = _INVALID_USAGE if len(set(places)) < size or len(ranks) < size else 0  # "Duplicate GPU detected"
    for connection, _ in ranks.values():
        with contextlib.suppress(OSError):
            connection.send(status)
    if not status:
        _Hub(ranks).run()


class _Hub:
    def __init__(self, ranks: dict[int, tuple[Connection, bool]]) -> None:
        self._ranks = ranks
        self._collectives: list[deque[_Given]] = [deque() for _ in ranks]
        self._messages: dict[tuple[int, int, str], deque[_Given]] = defaultdict(deque)

    def run(self) -> None:
        numbers = {connection: rank for rank, (connection, _) in self._ranks.items()}
        while numbers:
            for connection in cast("list[Connection]", wait(list(numbers))):
                try:
                    calls = connection.recv()
                except (OSError, EOFError):
                    del numbers[connection]
                else:
                    self._take(numbers[connection], calls)

    def _take(self, rank: int, calls: list[tuple[Call, bytes]]) -> None:
        batch = _Batch(*self._ranks[rank], calls)
        for index, (call, data) in enumerate(calls):
            given = _Given(call, data, batch, index)
            if call.kind in ("send", "recv"):
                pair = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
                self._messages[*pair, call.kind].append(given)
                self._deliver(*pair)
            else:
                self._collectives[rank].append(given)
                self._match()

    def _deliver(self, source: int, to: int) -> None:
        sent, wanted = self._messages[source, to, "send"], self._messages[source, to, "recv"]
        while sent and wanted and sent[0].call[1:3] == wanted[0].call[1:3]:
            message, receipt = sent.popleft(), wanted.popleft()
            _answer([(receipt, message.data), (message, None)])

    def _match(self) -> None:
        while all(self._collectives) and len({queue[0].call for queue in self._collectives}) == 1:
            given = [queue.popleft() for queue in self._collectives]
            results = _RESULTS[given[0].call.kind](given[0].call, [one.data for one in given])
            _answer(list(zip(given, results, strict=True)))


def _answer(results: list[tuple[_Given, bytes | None]]) -> None:
    for given, result in sorted(results, key=lambda result: result[0].batch.here):
        given.batch.answer(given.place, result)


def _reduced(call: Call, data: list[bytes]) -> np.ndarray[Any, Any]:
    arrays = [np.frombuffer(one, call.dtype) for one in data]
    with np.errstate(all="ignore"):
        if call.op < 4:
            return functools.reduce((np.add, np.multiply, np.maximum, np.minimum)[call.op], arrays)
        if call.dtype.kind not in "iu":
            share = call.dtype.type(1 / len(data))
            return functools.reduce(np.add, (array * share for array in arrays))
        total = functools.reduce(np.add, arrays)
        return np.sign(total) * (np.abs(total) // call.dtype.type(len(data)))


def _all_reduce(call: Call, data: list[bytes]) -> list[bytes | None]:
    return [_reduced(call, data).tobytes()] * len(data)


def _reduce(call: Call, data: list[bytes]) -> list[bytes | None]:
    result = _reduced(call, data).tobytes()
    return [result if rank == call.peer else None for rank in range(len(data))]


def _broadcast(call: Call, data: list[bytes]) -> list[bytes | None]:
    return [data[call.peer]] * len(data)


def _reduce_scatter(call: Call, data: list[bytes]) -> list[bytes | None]:
    return [part.tobytes() for part in np.split(_reduced(call, data), len(data))]


def _all_gather(call: Call, data: list[bytes]) -> list[bytes | None]:
    return [b"".join(data)] * len(data)


_RESULTS = {
    "allReduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduceScatter": _reduce_scatter,
    "allGather": _all_gather,
}
