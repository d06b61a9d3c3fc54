"""Links of many ranks as threads, over queues in memory: no descriptors, and every frame is counted."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

from rankmesh_agent.collectives.select import algorithm
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.frames import HEADER_BYTES, POSTED, Header
from rankmesh_agent.wire.ops import Call
from support.threads import in_threads

GROUP = 7
SECONDS = 60.0


class MemoryEngine:
    """What a MessageLink needs of a progress engine: frames go to queues at their receivers.

    Args:
        rank: this rank.
        engines: those of all ranks.

    Attributes:
        sent: the frames sent to each rank.
    """

    epoch = 1
    on_demand = False

    def __init__(self, rank: int, engines: list[MemoryEngine]) -> None:
        self.rank = rank
        self.lock = threading.RLock()
        self.lost_peers: dict[int, Any] = {}
        self.sent: Counter[int] = Counter()
        self.link: MessageLink
        self._engines = engines
        self._arrival = threading.Condition()
        self._arrivals = 0
        self._inbox: defaultdict[int, deque[tuple[Header, bytes]]] = defaultdict(deque)

    def send(self, rank: int, buffers: list[Any], transfer: Transfer | None = None) -> None:
        """Send frames, each a header and its payload, if it has one: they are copied, so it is done at once."""
        self.sent[rank] += 1
        parts, receiver = iter(buffers), self._engines[rank]
        with receiver._arrival:
            for encoded in parts:
                header = frames.decode(encoded)
                payload = bytes(next(parts)) if header.length else b""
                assert (len(encoded), len(payload)) == (HEADER_BYTES, header.length)
                receiver._inbox[self.rank].append((header, payload))
            receiver._arrivals += 1
            receiver._arrival.notify()
        if transfer is not None:
            transfer.done = True

    def take(self, rank: int, header: bytes, into: memoryview) -> bool:
        """Leave all frames to the queues."""
        return False

    def resume(self, rank: int) -> None:
        """Do nothing: each wait looks at all queues."""

    def wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], idle: Callable[[], object] | None = None
    ) -> None:
        """Deliver frames until ``ready()``."""
        end = time.monotonic() + SECONDS
        while True:
            seen = self._arrivals
            with self.lock:
                moved = self._deliver()
                if ready():
                    return
                if time.monotonic() > end:
                    raise TimeoutError(f"rank {self.rank} waits for {missing()}")
            with self._arrival:
                if not moved and self._arrivals == seen:
                    self._arrival.wait(0.05)

    def _deliver(self) -> bool:
        moved = False
        with self._arrival:
            waiting = [(rank, queue) for rank, queue in self._inbox.items() if queue]
        for rank, queue in waiting:
            while queue:
                header, payload = queue[0]
                if header.opcode in POSTED:
                    buffer = self.link.buffer_for(rank, header)
                    if buffer is None:
                        break
                    assert len(buffer) == len(payload)
                    buffer[:] = payload
                    payload = b""
                queue.popleft()
                moved = True
                self.link.on_frame(rank, header, payload)
        return moved


class MemoryWorld:
    """Ranks 0 … size - 1 with a link each.

    Args:
        size: how many.
        shares_cores: see Link.

    Attributes:
        links: the ranks' links.
        engines: the ranks' engines.
    """

    def __init__(self, size: int, *, shares_cores: bool = False) -> None:
        self.size = size
        self.engines: list[MemoryEngine] = []
        self.engines.extend(MemoryEngine(rank, self.engines) for rank in range(size))
        self.links = [MessageLink(engine, GROUP, range(size), rank) for rank, engine in enumerate(self.engines)]  # type: ignore[arg-type]
        for engine, link in zip(self.engines, self.links, strict=True):
            engine.link = link
            link.shares_cores = shares_cores
            link.calls.seconds = 1e6  # threads of one process wait for long; reports are for errors only
        self._seq = 0

    def run(self, function: Callable[[MessageLink], Any]) -> list[Any]:
        """Call ``function`` with each rank's link, all at once and as one call; return the results, by rank."""
        self._seq += 1
        for link, engine in zip(self.links, self.engines, strict=True):
            link.begin(self._seq, 1, engine.wait)
        return in_threads(self.size, lambda rank: function(self.links[rank]), SECONDS)

    def call(self, call: Call, arguments: Callable[[int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Execute a collective by the algorithm that the table selects; return each rank's arguments afterwards."""
        found = algorithm(call.kind, "link", call.nbytes, self.size, shares_cores=self.links[0].shares_cores)
        given = [arguments(rank) for rank in range(self.size)]
        self.run(lambda link: found(link, *given[link.rank]))
        return given

    def busiest(self) -> int:
        """Return the most frames that a rank has sent since the last question."""
        most = max(engine.sent.total() for engine in self.engines)
        for engine in self.engines:
            engine.sent.clear()
        return most
