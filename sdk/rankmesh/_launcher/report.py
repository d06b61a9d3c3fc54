"""Reports on the exit status of a job's ranks."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence

from rankmesh._launcher.failure import JobFailure
from rankmesh._launcher.rank import ExitStatus, Rank
from rankmesh_agent.wire.printable import printable
from rankmesh_agent.wire.schemas import RankInfo

_SAME_CALLS = "do all ranks make the same calls?"


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
            how = (
                f"had not ended: {_describe(rank)}" if rank.failed else f"ended with {rank.exit_status}: {_SAME_CALLS}"
            )
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
            key = failure.explain(rank.number), _describe(rank), failure.place(rank.number)
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
            yield _line(f"rank {rank.number}: {_describe(rank)}")


def _describe(rank: Rank) -> str:
    status = _exit_status(rank)
    text = str(status)
    if rank.sent is not None and status.signal == rank.sent:
        text += " from the launcher"
    return text


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
