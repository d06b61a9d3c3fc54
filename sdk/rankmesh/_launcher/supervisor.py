"""The event loop that watches over the ranks: one thread, which sleeps until something happens."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rankmesh._launcher.arguments import Options
from rankmesh._launcher.failure import JobFailure
from rankmesh._launcher.failure_file import FailureFile
from rankmesh._launcher.output import LogFile, TerminalWriter
from rankmesh._launcher.rank import Rank, Stream, command_of
from rankmesh._launcher.signals import SignalPipe
from rankmesh_agent.wire.schemas import RankInfo

if TYPE_CHECKING:
    from rankmesh._launcher.node_rendezvous import NodeRendezvous

DRAIN_SECONDS = 1.0
"""Time limit for child processes that outlive a failed rank and keep its output open."""
OUTPUT_LOST = 120
"""Exit code if all ranks have succeeded, but their output could not be written: as Python's when a flush fails."""
GOODBYE_SECONDS = 0.5
"""Time limit of the ranks after a second Ctrl-C."""


class Supervisor:
    """Forwards the output of the ranks, and terminates all of them after a failure or a signal.

    After a failure the others have ``failure_grace`` seconds to end by themselves (they notice the failure and can
    report what it broke), then they receive SIGTERM. After a signal, the launcher's or a forwarded one, they have
    ``stop_grace`` seconds, then they receive SIGKILL; after a second SIGINT from the user GOODBYE_SECONDS, in which
    they report to the ranks of other nodes that they were interrupted.

    The children of a rank that has succeeded go on. For those that hold its output the launcher waits: until all ranks
    have ended, and then for ``output_grace`` seconds.

    Args:
        ranks: the ranks of this node; the list changes as they are replaced.
        failures: where the ranks report which other ranks' failures have ended their groups.
        rendezvous: with the launchers of other nodes; None without any.

    Attributes:
        first_failure: the rank that ended first with a failure, before any signal from the user.
        elsewhere: returns the ranks of which a gateway in this process knows, by rank, those of other nodes too.
        broken: returns why the job cannot go on, '' if it can.
        replace: starts a process in place of a rank that has failed, and returns it with a remark, None if there is
            none; None if the failure of a rank ends the job.
    """

    def __init__(
        self,
        ranks: list[Rank],
        writers: tuple[TerminalWriter, TerminalWriter],
        inbox: SignalPipe,
        options: Options,
        failures: FailureFile,
        rendezvous: NodeRendezvous | None = None,
    ) -> None:
        self.first_failure: Rank | None = None
        self.signal: signal.Signals | None = None
        self.on_exit: Callable[[Rank], None] | None = None
        self.elsewhere: Callable[[], Mapping[int, RankInfo]] = dict
        self.broken: Callable[[], str] = str
        self.replace: Callable[[Rank], tuple[Rank, str] | None] | None = None
        self._failures = failures
        self._rendezvous = rendezvous
        self._ranks = ranks
        self._writers = tuple(dict.fromkeys(writers))
        self._messages = writers[1]
        self._options = options
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._must_end = False
        self._unreleased: list[Rank] = []
        self._holders_reported = False
        self._losses_reported: set[TerminalWriter | LogFile] = set()
        self._selector = selectors.PollSelector()  # epoll refuses the regular files that output is sent to
        self._selector.register(inbox.fd, selectors.EVENT_READ, inbox)
        if rendezvous is not None:
            self._selector.register(rendezvous.fd, selectors.EVENT_READ, rendezvous)
        for rank in ranks:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    @property
    def status(self) -> int:
        """The launcher's exit code."""
        failure = self.failure()
        if failure is not None:
            return failure.exit_code
        if self.signal is None and (self.broken() or (self._rendezvous is not None and self._rendezvous.must_end)):
            return 1
        if self.signal is not None:
            return 128 + self.signal
        files = [stream.file for rank in self._ranks for stream in rank.streams if stream.file is not None]
        lost = [output.lost for outputs in (self._writers, files) for output in outputs]
        return OUTPUT_LOST if any(lost) else 0

    def failure(self) -> JobFailure | None:
        """Return the failure of the job as far as it is known, None without one."""
        if self.first_failure is None:
            return None
        if self.replace is not None:  # the numbers in the reports are of a world whose ranks were numbered anew
            return JobFailure(self.first_failure, self._ranks, (), {})
        return JobFailure(self.first_failure, self._ranks, self._failures.reports(), self.elsewhere())

    def run(self) -> None:
        """Run until all ranks have ended and are released.

        If they have ended with success, wait then until those of the other nodes have, too, or the job is restarted.
        """
        while self._unreleased or not all(rank.released for rank in self._ranks):
            self._step()
        if self._rendezvous is None or self.first_failure is not None or self.signal or self._rendezvous.is_decided:
            return
        self._rendezvous.report("ended")
        while not self._rendezvous.is_decided and not self.signal:
            self._step()

    def flush(self) -> None:
        """Write the queued output, however long its readers take, or until a signal arrives."""
        came = self.signal
        until = time.monotonic() + DRAIN_SECONDS if came else None
        while self.signal is came and any(writer.pending for writer in self._writers):
            if until is not None and time.monotonic() >= until:
                return
            self._step(until)

    def _step(self, until: float | None = None) -> None:
        """Wait for the next event or deadline and handle it."""
        self._watch_pipes()
        ready = [key.data for key, _ in self._selector.select(self._timeout(until))]
        self._handle_exits([source for source in ready if isinstance(source, Rank)])
        for source in ready:
            match source:
                case Stream() if not source.closed:
                    source.read_some()
                    self._report_loss(source.file)
                case TerminalWriter():
                    source.write_some()
                    self._report_loss(source)
                case SignalPipe():
                    for number in source.read():
                        self._on_signal(number)
                case _ if self._rendezvous is not None and source is self._rendezvous:
                    self._rendezvous.acknowledge()
                    self._end_because(self._rendezvous.must_end)
        self._end_because(self.broken())
        self._handle_deadlines(time.monotonic())

    def _watch_pipes(self) -> None:
        """Register writers with queued output, and streams whose writers have room."""
        for writer in self._writers:
            self._watch(writer, selectors.EVENT_WRITE, writer.pending)
        for rank in {*self._ranks, *self._unreleased}:
            for stream in rank.streams:
                self._watch(stream, selectors.EVENT_READ, not stream.closed and not stream.blocked)

    def _watch(self, source: TerminalWriter | Stream, events: int, wanted: bool) -> None:
        watched = source.fd in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(source.fd, events, source)
        elif watched and not wanted:
            self._selector.unregister(source.fd)

    def _timeout(self, until: float | None) -> float | None:
        """Return the seconds to the next deadline, None without one."""
        deadlines = [self._terminate_at, self._kill_at, until, *map(self._release_at, self._unreleased)]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _handle_exits(self, ended: list[Rank]) -> None:
        endings = [(rank, rank.reap()) for rank in ended]
        # Their order is unknown. A signal is the likelier cause: the other ranks noticed that failure and exited.
        for rank, status in sorted(endings, key=lambda item: item[1].signal is None):
            self._selector.unregister(rank.pidfd)
            self._unreleased.append(rank)
            if self.on_exit is not None:
                self.on_exit(rank)
            if status.shell_status:
                rank.send(signal.SIGTERM)  # its children may hold its sockets open, which hides its end from peers
                if self.first_failure is None and self._is_failure(rank) and not self._try_replace(rank):
                    self._on_first_failure(rank)
            if rank.number == self._options.pdb and self.first_failure is not None and self._kill_at is None:
                self._terminate_at = time.monotonic() + self._options.failure_grace

    def _is_failure(self, rank: Rank) -> bool:
        """Return whether a rank's end is a failure: no end by a signal, or because another node joins."""
        joined = self._rendezvous is not None and self._rendezvous.nodes_changed
        return rank.ended_by_itself and not joined

    def _try_replace(self, rank: Rank) -> bool:
        """Start a process in place of a rank that has failed by itself; return whether the job goes on with it.

        A rank that ends because of another one's failure does not go on without that: so the job cannot.
        """
        if self.replace is None or any(each.pid == rank.pid and each.failed_ranks for each in self._failures.reports()):
            return False
        if not any(other.exit_status is None for other in self._ranks):
            return False  # no rank is left to call grow_group()
        for stream in rank.streams:
            stream.read_all()  # its last output precedes the message
        self._watch_pipes()  # the new process gets the descriptors of pipes that are closed
        found = self.replace(rank)
        if found is None:
            return False
        replacement, remark = found
        self._ranks[self._ranks.index(rank)] = replacement
        self._selector.register(replacement.pidfd, selectors.EVENT_READ, replacement)
        self._message(
            f"rank {rank.number} failed: {rank.exit_status}; {remark}: pid {replacement.pid} joins the others"
        )
        return True

    def _on_first_failure(self, rank: Rank) -> None:
        self.first_failure = next((other for other in self._running() if other.dies_of_signal()), rank)
        limit = f"the others get {self._options.failure_grace:g} s to end"
        if any(other.number == self._options.pdb for other in self._running()):
            limit = f"the others may go on until rank {self._options.pdb} ends (--pdb)"
        elif self._terminate_at is None:
            self._terminate_at = time.monotonic() + self._options.failure_grace
        if self._rendezvous is not None:
            self._rendezvous.report("failed")
        for stream in rank.streams:
            stream.read_all()  # its last output precedes the message
        failure = self.failure()
        if self._running() and failure is not None:
            what = failure.explain(rank.number) or f"failed: {rank.exit_status}"
            self._message(f"rank {rank.number} {what}; {limit}")

    def _end_because(self, why: str) -> None:
        """Say why another node, or a broken job, ends the attempt; end the ranks unless they are about to end."""
        begun = self.first_failure is not None or self.signal or self._terminate_at or self._kill_at
        self._must_end = self._must_end or bool(why)
        if why and self._running() and not begun:
            self._terminate_at = time.monotonic() + self._options.failure_grace
            self._message(f"{why}; those of this node get {self._options.failure_grace:g} s to end")

    def _on_signal(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.signal = number
            if self._rendezvous is not None:
                self._rendezvous.report("stopped")
            if self._running():
                again = "a second Ctrl-C" if number == signal.SIGINT else "Ctrl-C (SIGINT)"
                limit = f"they get {self._options.stop_grace:g} s to end, {again} kills them at once"
                self._message(f"{number.name} passed on to the ranks; {limit}")
            self._stop(number)
        elif number == signal.SIGINT:
            self._kill_at = min(self._kill_at or math.inf, time.monotonic() + GOODBYE_SECONDS)

    def _handle_deadlines(self, now: float) -> None:
        if self._terminate_at is not None and now >= self._terminate_at:
            self._stop(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._send(signal.SIGKILL)
        for rank in list(self._unreleased):
            at = self._release_at(rank)
            if at is not None and now >= at:
                if self._succeeded(rank) and not self._holders_reported and (pids := self._holders()):
                    self._holders_reported = True
                    self._message(
                        f"the ranks have ended, and their output is held open by {', '.join(map(command_of, pids))}; "
                        f"it gets {self._options.output_grace:g} s to end (--output-grace)"
                    )
                    return
                rank.release(only_holders=self._succeeded(rank))
                self._unreleased.remove(rank)

    def _release_at(self, rank: Rank) -> float | None:
        """Return when to let go of a rank that has ended; None if that depends on other events."""
        status = rank.exit_status
        assert status is not None, "the rank has ended"
        if all(stream.closed for stream in rank.streams):
            return status.at
        if not self._succeeded(rank):
            return status.at + DRAIN_SECONDS
        if self._running():
            return None
        ends = [each.exit_status.at for each in self._ranks if each.exit_status is not None]
        return max(ends) + DRAIN_SECONDS + (self._options.output_grace if self._holders_reported else 0)

    def _succeeded(self, rank: Rank) -> bool:
        """Return whether a rank has ended by itself with exit code 0, in a job that has not been ended."""
        ended = self.first_failure is not None or self.signal is not None or self._must_end
        return not ended and not rank.failed and rank.ended_by_itself

    def _holders(self) -> list[int]:
        return sorted({pid for rank in self._unreleased for pid in rank.holders()})

    def _report_loss(self, output: TerminalWriter | LogFile | None) -> None:
        """Report once that output could not be written: on stderr, if that is possible."""
        if output is not None and output.lost is not None and output not in self._losses_reported:
            self._losses_reported.add(output)
            self._message(f"cannot write to {output.name}, and output is lost: {output.lost.strerror}")

    def _stop(self, number: signal.Signals) -> None:
        """Signal the ranks, and set the deadline for SIGKILL."""
        self._send(number)
        self._terminate_at = None
        self._kill_at = time.monotonic() + self._options.stop_grace

    def _send(self, number: signal.Signals) -> None:
        for rank in self._running():
            rank.send(number)

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.exit_status is None]

    def _message(self, text: str) -> None:
        self._messages.write_lines([f"[rankmesh] {text}".encode()])
