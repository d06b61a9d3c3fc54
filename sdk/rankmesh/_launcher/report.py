"""How the ranks of a job ended, in words."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence

from rankmesh._launcher.rank import Ending, Rank


def failure_report(first: Rank, ranks: Sequence[Rank]) -> Iterator[bytes]:
    """Yield the lines that say which rank failed first, how, what its last words were, and how the others ended."""
    ending = _ending(first)
    where = f"host {socket.gethostname()}, pid {first.pid}"
    yield _said(f"rank {first.number} failed first: {ending} after {ending.at - first.started:.1f} s ({where})")
    if ending.signal == signal.SIGKILL:
        yield _said("  SIGKILL comes from the kernel when memory runs out ('dmesg' tells), or from somebody's kill -9")
    spoke = next((stream for stream in reversed(first.streams) if stream.tail), None)
    if spoke is None:
        yield _said("  it wrote nothing")
    else:
        yield _said(f"  the end of its {spoke.name}:")
        for line in spoke.tail:
            yield _said("  | ") + line
    for rank in ranks:
        if rank is not first:
            yield _said(f"rank {rank.number}: {_other(rank, ending.at)}")


def stop_report(ranks: Sequence[Rank]) -> Iterator[bytes]:
    """Yield the lines that say, after a signal ended the job, which ranks did not heed it."""
    for rank in ranks:
        if rank.sent == signal.SIGKILL:
            yield _said(f"rank {rank.number}: {_other(rank, None)}")


def _other(rank: Rank, failed_at: float | None) -> str:
    ending = _ending(rank)
    text = str(ending)
    if rank.sent is not None and ending.signal == rank.sent:
        text += " from the launcher"
    if failed_at is not None:
        text += f", {_when(ending.at - failed_at)}"
    return text


def _when(seconds: float) -> str:
    if abs(seconds) < 0.05:  # below that the order is a guess
        return "at the same time"
    return f"{seconds:.1f} s later" if seconds > 0 else f"{-seconds:.1f} s before"


def _ending(rank: Rank) -> Ending:
    assert rank.ending is not None, "the report is made when all ranks have ended"
    return rank.ending


def _said(text: str) -> bytes:
    return f"[rankmesh] {text}".encode()
