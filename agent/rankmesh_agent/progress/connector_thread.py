"""Thread that connects a rank to others on demand, when it or they have bytes to send, whatever its other threads do.

Only worlds that do not connect all pairs at the join have it. It sleeps while there is nothing to connect.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.progress.connect import Connector
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import Member

_DIAL_SECONDS = 60.0
"""Time limit of the attempts to connect to a rank."""
_ASK_SECONDS = 1.0
"""Interval at which the gateway is asked which ranks have ended, while one cannot be reached."""
_PAUSE_SECONDS = 0.1
"""Pause after an error of this process, such as the lack of a free descriptor."""
_FIND_SECONDS = 1.0
"""Interval at which the gateway is asked for addresses that it has not given."""
_SLEEP_SECONDS = 3600.0
_CLOSE_SECONDS = 0.2
"""Time limit of the handshakes that are under way when this rank leaves."""


class ConnectorThread(threading.Thread):
    """Connects the engine to ranks on demand.

    Args:
        connector: the connections of this process, which has joined; this object closes it.
        ended: maps ranks that cannot be reached to the ranks that have ended by the gateway's word, and how.
        find: returns the members of some ranks, with their addresses, as far as the gateway knows them; raises
            DistNetworkError if it does not answer.
    """

    def __init__(
        self,
        connector: Connector,
        ended: Callable[[Collection[int]], Mapping[int, Goodbye]],
        find: Callable[[Collection[int]], Iterable[Member]],
    ) -> None:
        super().__init__(name="rankmesh-connect", daemon=True)
        self._connector = connector
        self._ended = ended
        self._find = find
        self._find_at = 0.0
        self._engine: ProgressEngine | None = None
        self._wanted: deque[int] = deque()
        self._asked = 0.0
        self._closing = False
        self._closed = False
        self._lock = threading.Lock()  # the eventfd is not written to after its number has become another file's
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def serve(self, engine: ProgressEngine) -> None:
        """Make connections for an engine from now on."""
        self._engine = engine
        self.start()

    def dial(self, rank: int) -> None:
        """Connect to a rank soon; from any thread, without waiting."""
        self._wanted.append(rank)
        self._wake()

    def run(self) -> None:
        """Make connections until ``close``."""
        engine = self._engine
        assert engine is not None
        while not self._closing:
            try:
                self._advance(engine)
            except Exception as error:  # the ranks that wait for a connection have deadlines of their own
                log_failure("a connection to another rank could not be made", error)
                time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """End the thread. Does nothing the second time.

        Connections under way have a moment to become ready: the engine, which is still open, says goodbye on them.
        """
        self._closing = True
        self._wake()
        if self.is_alive():
            self.join()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wakeup)
        connector, deadline = self._connector, Deadline(_CLOSE_SECONDS)
        while self._engine is not None and connector.dialing() and not deadline.expired():
            connector.advance(deadline.remaining())
        self._hand_over()
        connector.close()

    def _find_addresses(self, ranks: Collection[int]) -> dict[int, str]:
        """Get the addresses of ranks from the gateway; return those that it has not given, and why."""
        why = "the gateway does not know its address"
        try:
            for member in self._find(ranks):
                self._connector.add(member)
        except DistNetworkError as error:
            why = f"its address is not known, and {error.message}"
        self._find_at = time.monotonic() + _FIND_SECONDS
        return {rank: why for rank in ranks if not self._connector.can_dial(rank)}

    def _wake(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def _hand_over(self) -> None:
        if self._engine is not None:
            for rank, connection in self._connector.take().items():
                self._engine.add_connection(rank, connection)

    def _advance(self, engine: ProgressEngine) -> None:
        connector = self._connector
        wanted = {self._wanted.popleft() for _ in range(len(self._wanted))} | engine.unaddressed.keys()
        unaddressed = {rank for rank in wanted - engine.lost_peers.keys() if not connector.can_dial(rank)}
        if unaddressed - engine.unaddressed.keys() or (unaddressed and time.monotonic() >= self._find_at):
            engine.unaddressed = self._find_addresses(unaddressed)
        else:
            engine.unaddressed = {rank: engine.unaddressed[rank] for rank in unaddressed}
        for rank in wanted - engine.unaddressed.keys() - engine.lost_peers.keys():
            connector.dial(rank, Deadline(_DIAL_SECONDS))
        connector.advance(_FIND_SECONDS if engine.unaddressed else _SLEEP_SECONDS, self._wakeup)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        self._hand_over()
        while connector.failures:
            rank, error = connector.failures.popitem()
            why = f"rank {engine.rank} cannot connect to it: {error.message}"  # other ranks are told, too
            engine.lose(rank, Goodbye(why, died=True))
        unreached = connector.unreached()
        # A rank that dials this one at the same time rejects the first attempt.
        asked = [each.peer.rank for each in unreached if each.rounds > 1 and not each.silent()]
        if (asked or engine.unaddressed) and time.monotonic() - self._asked > _ASK_SECONDS:
            for rank, end in self._ended(asked).items():
                # Others have failed at the gateway also if they are only stopped.
                if end.clean or rank in asked or rank in engine.unaddressed:
                    engine.lose(rank, end)
            self._asked = time.monotonic()
        for outgoing in unreached:
            rank = outgoing.peer.rank
            if outgoing.silent():  # a stopped process is waited for, as where all ranks are connected
                outgoing.deadline.restart(_DIAL_SECONDS)
            elif outgoing.deadline.expired():
                engine.lose(rank, Goodbye(outgoing.error().message, died=True))
            if rank in engine.lost_peers:
                connector.cancel(rank)
