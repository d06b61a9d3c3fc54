"""Reports on the exit status of a job's ranks."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence

from rankmesh._launcher.failure import JobFailure
from rankmesh._launcher.rank import ExitStatus, Rank
from rankmesh_agent.wire.printable import printable


def failure_report(failure: JobFailure, ranks: Sequence[Rank]) -> Iterator[bytes]:
    """Yield the lines of a failure report: the cause, the last output of its rank, the exit status of the others.

    If the cause is on another node, or had to be ended, the last output is of the rank that ended first.
    """
    origin = failure.origin
    status = _exit_status(origin)
    if failure.cause == origin.number:
        what = f"rank {origin.number} failed first"
    else:
        yield _line(_elsewhere(failure, ranks))
        what = f"rank {origin.number} {failure.explain(origin.number)}"
    where = f"host {socket.gethostname()}, pid {origin.pid}"
    yield _line(f"{what}: {status} after {status.at - origin.started:.1f} s ({where})")
    if status.signal == signal.SIGKILL:
        yield _line("  SIGKILL comes from the kernel when memory runs out (see 'dmesg'), or from kill -9")
    if not status.shell_status:
        yield _line("  it left the job while others waited for it: do all ranks make the same calls?")
    written = next((stream for stream in reversed(origin.streams) if stream.tail), None)
    if written is None:
        yield _line("  it wrote nothing")
    else:
        yield _line(f"  the end of its {written.name}:")
        for line in written.tail:
            yield _line("  | ") + line
    for rank in ranks:
        if rank is not origin:
            why, how = failure.explain(rank.number), _describe(rank, status.at)
            yield _line(f"rank {rank.number}: {f'{why} ({how})' if why else how}")


def _elsewhere(failure: JobFailure, ranks: Sequence[Rank]) -> str:
    """Return the line on a cause that is on another node, or that had not ended by itself."""
    for rank in ranks:
        if rank.number == failure.cause:
            return f"rank {failure.cause} failed first, and had not ended: {_describe(rank, None)}"
    text = f"rank {failure.cause} failed first, on another node"
    info = failure.info
    return text if info is None else f"{text} ({info.member.host}, pid {info.member.pid}): {info.reason or info.state}"


def stop_report(ranks: Sequence[Rank]) -> Iterator[bytes]:
    """Yield a line for each rank that a signal did not end and that had to be killed."""
    for rank in ranks:
        if rank.sent == signal.SIGKILL:
            yield _line(f"rank {rank.number}: {_describe(rank, None)}")


def _describe(rank: Rank, failed_at: float | None) -> str:
    status = _exit_status(rank)
    text = str(status)
    if rank.sent is not None and status.signal == rank.sent:
        text += " from the launcher"
    if failed_at is not None:
        text += f", {_when(status.at - failed_at)}"
    return text


def _when(seconds: float) -> str:
    if abs(seconds) < 0.05:  # the order of closer events is unknown
        return "at the same time"
    return f"{seconds:.1f} s later" if seconds > 0 else f"{-seconds:.1f} s before"


def _exit_status(rank: Rank) -> ExitStatus:
    assert rank.exit_status is not None, "reports are made after all ranks have ended"
    return rank.exit_status


def _line(text: str) -> bytes:
    return f"[rankmesh] {printable(text)}".encode()
