"""Snapshots of this rank for diagnosis, and their server."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from rankmesh_agent.diagnostics.stacks import stacks
from rankmesh_agent.group.flight_recorder import FlightRecorder, Record, describe, op_name
from rankmesh_agent.net.stream import FramedStream
from rankmesh_agent.net.stream_server import StreamServer
from rankmesh_agent.progress.status import Status
from rankmesh_agent.store.client import Call as StoreCall
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.hello import Client, Service
from rankmesh_agent.wire.ops import Call
from rankmesh_agent.wire.snapshot import (
    MAX_CALLS,
    MAX_ENDED,
    RANK_BYTES,
    WATCH_SECONDS,
    ProcessView,
    RankSnapshot,
    RankWaits,
    SnapshotCall,
    SnapshotGroup,
    SnapshotStoreWait,
)

_MAX_CLIENTS = 8
"""Authenticated clients that are served at once; more wait."""
_MAX_KEYS = 10
_MOMENT_SECONDS = 0.005
"""Mean time between two looks at the waits: at random, as steps may be as regular."""
_MAX_ERROR_CHARACTERS = 500
_BEGIN: Final = 3
"""Index of the begin in a Record."""


def snapshot(
    job: str,
    epoch: int,
    rank: int,
    *,
    attached: bool,
    recorder: FlightRecorder,
    awaited: Collection[float],
    store_waits: Collection[StoreCall[Any]],
    max_ended: int = MAX_ENDED,
) -> RankSnapshot:
    """Return the snapshot of a rank; for the arguments see RankSnapshot and ``add_calls``."""
    found = RankSnapshot(job, epoch, rank, attached, stacks=stacks(), cpu_seconds=time.process_time())
    found.monotonic = time.monotonic()
    add_calls(found, recorder, awaited, store_waits, found.monotonic, max_ended)
    return found


def watch_waits(waits: Callable[[], Iterable[Status]]) -> RankWaits:
    """Return which ranks this process waits for in collectives in the next WATCH_SECONDS, at some 200 moments.

    Args:
        waits: returns its calls and messages that wait.
    """
    end, moments, counted = time.monotonic() + WATCH_SECONDS, 0, Counter[tuple[int, str]]()
    while time.monotonic() < end:
        counted.update(
            (rank, f"{wait.group:016x} {wait.seq}") for wait in waits() if wait.seq >= 0 for _, rank in wait.waits_for
        )
        moments += 1
        time.sleep(random.uniform(0.5, 1.5) * _MOMENT_SECONDS)
    found: dict[str, dict[str, float]] = {}
    for (rank, call), count in counted.items():
        found.setdefault(str(rank), {})[call] = count / moments
    return RankWaits(found)


def add_calls(
    found: RankSnapshot,
    recorder: FlightRecorder,
    awaited: Collection[float],
    store_waits: Collection[StoreCall[Any]],
    at: float,
    max_ended: int,
) -> None:
    """Add the groups and calls of a rank to its snapshot, as they were at a time by the monotonic clock.

    Args:
        awaited: begin of each message for which a thread waits, by the monotonic clock.
        store_waits: the calls of the job's store that wait.
        at: the time: a call that has failed since was in flight then.
        max_ended: maximum number of ended calls of a group.
    """
    groups, active, records = recorder.snapshot()
    algorithms = recorder.algorithms()
    found.groups += [SnapshotGroup(group.id, group.name, list(group.ranks), group.seq) for group in groups]
    failed_since = [record for record in records if _has_failed_since(record, at)]
    in_flight: dict[object, Record] = {}
    for record in [*failed_since, *active]:
        group, _, seq, begin, *_ = record
        key = (group.id, seq) if seq else id(record)
        # A call of an attached process may have begun before its last request to this agent.
        if begin <= min(at, in_flight.get(key, record)[_BEGIN]):
            in_flight[key] = record
    for record in list(in_flight.values())[:MAX_CALLS]:
        begin = record[_BEGIN]
        call = _call(record, at - begin, algorithms)
        call.awaited = call.peer is None or begin in awaited
        found.calls.append(call)
    since = set(map(id, failed_since))
    latest: dict[str, deque[Record]] = defaultdict(lambda: deque(maxlen=max_ended))
    for record in records:
        if id(record) not in since:
            latest[record[0].id].append(record)
    for record in (record for records in latest.values() for record in records):
        _, _, _, begin, end, error, _ = record
        call = _call(record, at - (end or at), algorithms)
        call.error, call.seconds = error[:_MAX_ERROR_CHARACTERS], (end or begin) - begin
        found.ended.append(call)
    found.store_waits += [
        SnapshotStoreWait(
            wait.command.name, list(wait.awaited_keys()[:_MAX_KEYS]), max(0.0, at - wait.began), wait.command.seconds
        )
        for wait in list(store_waits)[:MAX_CALLS]
    ]


def _has_failed_since(record: Record, at: float) -> bool:
    _, _, _, _, end, error, _ = record
    return bool(error) and (end or at) >= at


def _call(record: Record, age: float, algorithms: Mapping[str, Mapping[Call, str]]) -> SnapshotCall:
    owner, what, seq = record[:3]
    found = SnapshotCall(owner.id, seq, op_name(what), describe(record), max(0.0, age), nbytes=record[-1])
    if isinstance(what, Call):
        found.algorithm = algorithms.get(owner.id, {}).get(what, "")
    else:
        _, _, _, found.peer, found.tag = what
    return found


class SnapshotServer(StreamServer[FramedStream]):
    """Sends a document to each client.

    Args:
        take: returns the document for a client: a snapshot, None if there is no rank.
        credentials: see StreamServer.
        service: SNAPSHOT; RECORDS, with more calls; WAITS; or PROCESS, whose clients name a rank.
    """

    def __init__(
        self,
        take: Callable[[Client], RankSnapshot | ProcessView | RankWaits | None],
        credentials: Callable[[], Credentials],
        service: Service = Service.SNAPSHOT,
    ) -> None:
        super().__init__(service, FramedStream, credentials)
        self.attachment_bytes = RANK_BYTES if service is Service.PROCESS else 0
        self._take = take
        self._served = threading.BoundedSemaphore(_MAX_CLIENTS)

    def serve(self, stream: FramedStream, client: Client) -> None:
        with self._served:
            stream.send(json_text.encode(self._take(client)))
