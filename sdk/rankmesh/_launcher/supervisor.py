"""The event loop that watches over the ranks: one thread, which sleeps until something happens."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence

from rankmesh._launcher.output import Sink
from rankmesh._launcher.rank import Rank, Stream
from rankmesh._launcher.signals import SignalInbox

DRAIN_SECONDS = 1.0
"""How long what a rank left behind may keep the rank's output open."""

_Source = Rank | Stream | Sink | SignalInbox


class Supervisor:
    """Passes on the output of the ranks, and ends them all when one fails or a signal comes.

    After a failure the others have ``failure_grace`` seconds to end by themselves (they will see the failure, and can
    say what it broke), then they get SIGTERM. After a signal, ours or one from outside that is passed on, they have
    ``stop_grace`` seconds, then they get SIGKILL. A second SIGINT from outside is SIGKILL at once.

    Attributes:
        first_failure: the rank that failed first, before any signal came from outside.
        signal: the first signal that came from outside.
        on_ending: is told of each rank whose process has ended.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        sinks: tuple[Sink, Sink],
        inbox: SignalInbox,
        *,
        failure_grace: float,
        stop_grace: float,
    ) -> None:
        self.first_failure: Rank | None = None
        self.signal: signal.Signals | None = None
        self.on_ending: Callable[[Rank], None] | None = None
        self._ranks = ranks
        self._sinks = tuple(dict.fromkeys(sinks))
        self._messages = sinks[1]
        self._failure_grace = failure_grace
        self._stop_grace = stop_grace
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._release_at: dict[Rank, float] = {}
        self._selector = selectors.PollSelector()  # epoll refuses the regular files that output is sent to
        self._selector.register(inbox.fd, selectors.EVENT_READ, inbox)
        for rank in ranks:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    @property
    def status(self) -> int:
        """The exit code that says how it went."""
        if self.first_failure and self.first_failure.ending:
            return self.first_failure.ending.status
        return 128 + self.signal if self.signal else 0

    def run(self) -> None:
        """Return when all ranks have ended and nothing of them is left."""
        while not all(rank.released for rank in self._ranks):
            self._step()

    def flush(self) -> None:
        """Write out what is queued, for as long as its readers take, or until a signal comes."""
        came = self.signal
        until = time.monotonic() + DRAIN_SECONDS if came else None
        while self.signal is came and any(sink.pending for sink in self._sinks):
            if until is not None and time.monotonic() >= until:
                return
            self._step(until)

    def _step(self, until: float | None = None) -> None:
        """Wait for the next event or deadline and deal with it."""
        self._watch_pipes()
        ready: list[_Source] = [key.data for key, _ in self._selector.select(self._patience(until))]
        self._note_endings([source for source in ready if isinstance(source, Rank)])
        for source in ready:
            match source:
                case Stream() if not source.closed:
                    source.read_some()
                case Sink():
                    source.write_some()
                case SignalInbox():
                    for number in source.read():
                        self._on_signal(number)
        self._keep_deadlines(time.monotonic())

    def _watch_pipes(self) -> None:
        """Watch the sinks that have something to write, and the streams whose sinks have room."""
        for sink in self._sinks:
            self._watch(sink, selectors.EVENT_WRITE, sink.pending)
        for rank in self._ranks:
            for stream in rank.streams:
                self._watch(stream, selectors.EVENT_READ, not stream.closed and not stream.sink.full)

    def _watch(self, source: Sink | Stream, events: int, wanted: bool) -> None:
        watched = source.fd in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(source.fd, events, source)
        elif watched and not wanted:
            self._selector.unregister(source.fd)

    def _patience(self, until: float | None) -> float | None:
        """Return the seconds to the next deadline."""
        deadlines = [self._terminate_at, self._kill_at, until, *self._release_at.values()]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _note_endings(self, ended: list[Rank]) -> None:
        endings = [(rank, rank.note_ending()) for rank in ended]
        # Ranks that ended since we last looked have no order. Who died of a signal is the likelier cause: the others
        # saw that rank fail, and exited.
        for rank, ending in sorted(endings, key=lambda item: item[1].signal is None):
            self._selector.unregister(rank.pidfd)
            self._release_at[rank] = ending.at + DRAIN_SECONDS
            if self.on_ending is not None:
                self.on_ending(rank)
            if ending.status:
                rank.send(signal.SIGTERM)  # what it forked may hold its sockets open, and peers would not see it die
                if self.first_failure is None and self.signal is None:
                    self._on_first_failure(rank)

    def _on_first_failure(self, rank: Rank) -> None:
        self.first_failure = next((other for other in self._running() if other.dies_of_signal()), rank)
        self._terminate_at = time.monotonic() + self._failure_grace
        for stream in rank.streams:
            stream.read_all()  # so that its last words come before ours
        if self._running():
            self._say(f"rank {rank.number} failed: {rank.ending}; the others get {self._failure_grace:g} s to end")

    def _on_signal(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.signal = number
            if self._running():
                self._say(f"{number.name} passed on to the ranks; they get {self._stop_grace:g} s to end")
            self._stop(number)
        elif number == signal.SIGINT:
            self._kill_at = time.monotonic()

    def _keep_deadlines(self, now: float) -> None:
        if self._terminate_at is not None and now >= self._terminate_at:
            self._stop(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._send(signal.SIGKILL)
        for rank, deadline in list(self._release_at.items()):
            if now >= deadline or all(stream.closed for stream in rank.streams):
                rank.release()
                del self._release_at[rank]

    def _stop(self, number: signal.Signals) -> None:
        """Tell the ranks to end, and set the time when they have to."""
        self._send(number)
        self._terminate_at = None
        self._kill_at = time.monotonic() + self._stop_grace

    def _send(self, number: signal.Signals) -> None:
        for rank in self._running():
            rank.send(number)

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.ending is None]

    def _say(self, text: str) -> None:
        self._messages.show([f"[rankmesh] {text}".encode()])
