"""Snapshots of this rank for diagnosis, and their server."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection

from rankmesh_agent.diagnostics.stacks import stacks
from rankmesh_agent.group.flight_recorder import FlightRecorder, Record, describe, op_name
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.store.base import KeyWaitInfo
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.handshake import server_script
from rankmesh_agent.wire.ops import Call
from rankmesh_agent.wire.snapshot import (
    MAX_CALLS,
    MAX_ENDED,
    UPGRADE,
    RankSnapshot,
    SnapshotCall,
    SnapshotGroup,
    SnapshotStoreWait,
)

_CLIENT_SECONDS = 10.0
"""Time limit of the handshake, and of each send."""
_MAX_CLIENTS = 8
"""Connections that are served at once; the server closes any more."""
_MAX_KEYS = 10

_log = logging.getLogger("rankmesh")


def snapshot(
    job: str,
    epoch: int,
    rank: int,
    *,
    attached: bool,
    recorder: FlightRecorder,
    awaited: Collection[int],
    store_waits: Collection[KeyWaitInfo],
) -> RankSnapshot:
    """Return the snapshot of a rank.

    Args:
        job, epoch, rank, attached: see RankSnapshot.
        recorder: has the groups and their calls.
        awaited: ids of the records of messages for which a thread waits.
        store_waits: the calls of the job's store that wait.
    """
    now = time.monotonic()
    groups, active, ended = recorder.snapshot()
    latest: dict[str, deque[Record]] = defaultdict(lambda: deque(maxlen=MAX_ENDED))
    for record in ended:
        latest[record[0].id].append(record)
    return RankSnapshot(
        job,
        epoch,
        rank,
        attached,
        [SnapshotGroup(group.id, group.name, list(group.ranks), group.seq) for group in groups],
        [_call(record, now, awaited) for record in active[:MAX_CALLS]],
        [_call(record, now, ()) for records in latest.values() for record in records],
        [
            SnapshotStoreWait(wait.op, list(wait.keys[:_MAX_KEYS]), now - wait.since, wait.seconds)
            for wait in list(store_waits)[:MAX_CALLS]
        ],
        stacks(),
    )


def _call(record: Record, now: float, awaited: Collection[int]) -> SnapshotCall:
    owner, what, seq, started, ended, _, _ = record
    found = SnapshotCall(owner.id, seq, op_name(what), describe(record), max(0.0, now - (ended or started)))
    if not isinstance(what, Call):
        _, _, _, found.peer, found.tag = what
        found.awaited = id(record) in awaited
    return found


class SnapshotServer:
    """Sends a snapshot to each connection that requests it by ``wire.snapshot.UPGRADE``: a ConnectionHandler.

    Args:
        take: returns the snapshot; None if there is no rank.
        token: the job's secret.
    """

    def __init__(self, take: Callable[[], RankSnapshot | None], token: str) -> None:
        self._take = take
        self._token = token
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._closed = False

    def handle(self, sock: socket.socket) -> None:
        """Serve a connection whose client has requested the upgrade, in a thread of its own. From any thread."""
        thread = threading.Thread(target=self._serve, args=(sock,), name="rankmesh-snapshot", daemon=True)
        with self._lock:
            admitted = not self._closed and len(self._clients) < _MAX_CLIENTS
            if admitted:
                self._clients[sock] = thread
        if not admitted:
            sock.close()
            return
        try:
            thread.start()
        except BaseException:
            self._forget(sock)
            raise

    def close(self) -> None:
        """End the connections, and wait for their threads. Does nothing the second time."""
        with self._lock:
            self._closed = True
            clients = dict(self._clients)
            for sock in clients:  # a thread closes its socket only after it has taken the lock
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in clients.values():
            if thread is not threading.current_thread():
                thread.join(_CLIENT_SECONDS)

    def close_in_child(self) -> None:
        """Close the parent's descriptors in a forked child."""
        self._closed = True
        self._lock = threading.Lock()
        for sock in self._clients:
            sock.close()
        self._clients.clear()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_CLIENT_SECONDS)
            sock.sendall(UPGRADE.response())
            handshake = Handshake(sock, server_script(self._token))
            try:
                handshake.run(_CLIENT_SECONDS)
            finally:
                handshake.close()
            found = self._take()
            sock.settimeout(_CLIENT_SECONDS)
            sock.sendall(json.dumps(found, default=vars).encode())
        except (OSError, DistError) as error:
            _log.debug("a client that asked for a snapshot got none: %s", error)
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._clients.pop(sock, None)
            sock.close()
