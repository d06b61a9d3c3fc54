"""Reports on the exit status of a job's ranks."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence

from rankmesh._launcher.rank import ExitStatus, Rank


def failure_report(first: Rank, ranks: Sequence[Rank]) -> Iterator[bytes]:
    """Yield the lines of a failure report: the first failed rank, its last output, the exit status of the others."""
    status = _exit_status(first)
    where = f"host {socket.gethostname()}, pid {first.pid}"
    yield _line(f"rank {first.number} failed first: {status} after {status.at - first.started:.1f} s ({where})")
    if status.signal == signal.SIGKILL:
        yield _line("  SIGKILL comes from the kernel when memory runs out (see 'dmesg'), or from kill -9")
    written = next((stream for stream in reversed(first.streams) if stream.tail), None)
    if written is None:
        yield _line("  it wrote nothing")
    else:
        yield _line(f"  the end of its {written.name}:")
        for line in written.tail:
            yield _line("  | ") + line
    for rank in ranks:
        if rank is not first:
            yield _line(f"rank {rank.number}: {_describe(rank, status.at)}")


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
    return f"[rankmesh] {text}".encode()
