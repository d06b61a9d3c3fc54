"""Failure of a job: the rank whose failure caused the others', and the launcher's report on it."""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence

from rankmesh._launcher.failure_file import FailureReport
from rankmesh._launcher.rank import ExitStatus, Rank
from rankmesh_agent.wire.printable import printable
from rankmesh_agent.wire.schemas import RankInfo

_SAME_CALLS = "do all ranks make the same calls?"


def root_cause(first: int, named: Mapping[int, Sequence[int]], failed: Sequence[int]) -> int:
    """Return the rank whose failure caused that of another one.

    ``named`` are the ranks that a rank's failure names; of several, those are preferred that failed first.
    """
    chain = [first]
    while names := named.get(chain[-1]):
        name = min(names, key=lambda rank: failed.index(rank) if rank in failed else len(failed))
        if name in chain:  # they blame each other
            return name
        chain.append(name)
    return chain[-1]


class JobFailure:
    """The failure of a job, as one node knows it.

    Args:
        elsewhere: the ranks that the gateway knows, by rank, if this node has it.

    Attributes:
        named: the ranks that a rank's first failure names, by rank, on all nodes as far as known.
        cause: the rank at which the chain of names ends. It need not have failed: it may have left too early, or hang.
        info: the gateway's description of a cause on another node, None without one.
        origin: the cause, if it has failed by itself on this node, else the rank that ended first.
    """

    def __init__(
        self, first: Rank, ranks: Sequence[Rank], reports: Sequence[FailureReport], elsewhere: Mapping[int, RankInfo]
    ) -> None:
        self.first = first
        self._here = {rank.number: rank for rank in ranks}
        self._elsewhere = others = {number: info for number, info in elsewhere.items() if number not in self._here}
        named = {number: info.failed_ranks for number, info in others.items()}
        named |= {report.rank: report.failed_ranks for report in reports}
        self.named = {number: names for number, names in named.items() if names}
        self._places = {report.rank: report.place for report in reports}
        failed = [rank.number for rank in sorted(ranks, key=_ended_at) if rank.failed and rank.ended_by_itself]
        self.cause = root_cause(first.number, self.named, failed)
        if self.cause not in self._here and self.cause not in others:
            # Another node knows which ranks that one names. A rank that failed here and names none is a cause.
            self.cause = next((number for number in failed if number not in self.named), self.cause)
        self.info = others.get(self.cause)
        cause = self._here.get(self.cause)
        self.origin = cause if cause is not None and self.has_failed(self.cause) else first

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: that of the origin."""
        status = self.origin.exit_status
        return 1 if status is None else status.shell_status

    def has_failed(self, rank: int) -> bool:
        """Return whether a rank is known to have failed by itself: to have ended, and not with exit code 0."""
        here, info = self._here.get(rank), self._elsewhere.get(rank)
        if here is not None:
            return here.failed and here.ended_by_itself
        return info is not None and (info.state == "failed" or bool(info.reason))

    def place(self, rank: int) -> str:
        """Return the line of the user's code with a rank's exception, ``, at train.py:8 in step``, or nothing."""
        place = self._places.get(rank)
        return f", at {place}" if place else ""

    def explain(self, rank: int) -> str:
        """Return why a rank ended: ``ended because rank 2 failed``; empty if its failure names no other rank."""
        named = self.named.get(rank)
        if not named:
            return ""
        name = self.cause if self.cause in named else named[0]
        where = "" if name in self._here else " on another node"
        if self.has_failed(name):
            return f"ended because rank {name} failed{where}"
        return f"failed, and its error names rank {name}{where}"


def _ended_at(rank: Rank) -> float:
    return rank.exit_status.at if rank.exit_status is not None else math.inf


def failure_report(failure: JobFailure, ranks: Sequence[Rank]) -> Iterator[bytes]:
    """Yield the lines of a failure report: the cause, the last output of its rank, the exit status of the others.

    If the cause is on another node, or has not failed by itself, the last output is of the rank that ended first.
    """
    origin = failure.origin
    status = _exit_status(origin)
    if failure.info is not None:
        yield _line(_elsewhere(failure, failure.info))
    what = f"rank {origin.number} {failure.explain(origin.number) or 'failed first'}"
    where = f"host {socket.gethostname()}, pid {origin.pid}"
    place = failure.place(origin.number)
    yield _line(f"{what}: {status} after {status.at - origin.started:.1f} s{place} ({where})")
    if status.signal == signal.SIGKILL:
        yield _line("  SIGKILL comes from the kernel when memory runs out (see 'dmesg'), or from kill -9")
    for rank in ranks:
        if rank.number == failure.cause and rank is not origin:
            how = f"had not ended: {rank.ending}" if rank.failed else f"ended with {rank.exit_status}: {_SAME_CALLS}"
            yield _line(f"  rank {rank.number} {how}")
    written = next((stream for stream in reversed(origin.streams) if stream.tail), None)
    if written is None:
        yield _line("  it wrote nothing")
    else:
        file = f" ({written.file.name})" if written.file is not None else ""
        yield _line(f"  the end of its {written.name}{file}:")
        for line in written.tail:
            yield _line("  | ") + line
    alike: dict[tuple[str, str, str], list[Rank]] = {}
    for rank in ranks:
        if rank is not origin:
            key = failure.explain(rank.number), rank.ending, failure.place(rank.number)
            alike.setdefault(key, []).append(rank)
    for (why, how, place), group in alike.items():
        seconds = [_exit_status(rank).at - status.at for rank in group]
        how = f"{how}, {_when(min(seconds), max(seconds))}{place}"
        yield _line(f"{_names(group)}: {f'{why} ({how})' if why else how}")


def _elsewhere(failure: JobFailure, info: RankInfo) -> str:
    """Return the line on a cause that is on another node."""
    what = " failed first" if failure.has_failed(failure.cause) else ""
    where = f"on another node ({info.member.host}, pid {info.member.pid})"
    return f"rank {failure.cause}{what}, {where}: {info.reason or info.state}"


def stop_report(ranks: Sequence[Rank]) -> Iterator[bytes]:
    """Yield a line for each rank that a signal did not end and that had to be killed."""
    for rank in ranks:
        if rank.sent == signal.SIGKILL:
            yield _line(f"rank {rank.number}: {rank.ending}")


def _when(first: float, last: float) -> str:
    """Return when ranks ended, the first and the last of them, in seconds since the cause."""
    if -0.05 < first <= last < 0.05:  # the order of closer events is unknown
        return "at the same time"
    if first < -0.05 and last > 0.05:
        return f"{-first:.1f} s before to {last:.1f} s later"
    times = dict.fromkeys(f"{abs(seconds):.1f}" for seconds in (first, last))
    return f"{' to '.join(times)} s {'later' if last > 0.05 else 'before'}"


def _names(ranks: Sequence[Rank]) -> str:
    from rankmesh_gateway.humanize import ranks as as_ranges

    return f"rank{'s' * (len(ranks) > 1)} {as_ranges(rank.number for rank in ranks)}"


def _exit_status(rank: Rank) -> ExitStatus:
    assert rank.exit_status is not None, "reports are made after all ranks have ended"
    return rank.exit_status


def _line(text: str) -> bytes:
    return f"[rankmesh] {printable(text)}".encode()
