"""Snapshots of ranks, fetched from their agents at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.dial import connect
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import AuthenticationError, DistError
from rankmesh_agent.wire.hello import Service, client_script, hello
from rankmesh_agent.wire.snapshot import MAX_SNAPSHOT_BYTES
from rankmesh_gateway.diagnosis.reports import RankReport, Snapshot

_CONCURRENCY = 128
_CHUNK_BYTES = 1 << 18
_STOPPED_SECONDS = 0.2
"""Seconds in which the agent of a stopped process must answer: it cannot."""


def add_snapshots(reports: Sequence[RankReport], token: str, patience: float, limit: float = math.inf) -> None:
    """Ask the agents of ranks for their snapshots, at once, and add these to the reports, or the errors.

    Args:
        reports: the ranks.
        token: the gateway's token, or the job's credential.
        patience: seconds in which an agent must answer.
        limit: seconds in which all of them must.
    """
    if not reports:
        return
    end = Deadline(limit)
    pool = ThreadPoolExecutor(min(_CONCURRENCY, len(reports)), "rankmesh-diagnosis")
    try:
        list(pool.map(lambda report: _add_snapshot(report, token, patience, end), reports))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _add_snapshot(report: RankReport, token: str, patience: float, end: Deadline) -> None:
    if report.state == "joining":
        report.error = "it waits for its world to join"
        return
    if end.expired():
        report.error = f"not asked: others have not answered within {end.seconds:g} s"
        return
    stopped = report.local and process_state(report.pid) in ("T", "t")
    limit = min(end.remaining(), patience, _STOPPED_SECONDS if stopped else patience)
    try:
        report.snapshot = fetch_snapshot(report.url, for_job(token, report.job), limit)
        if report.snapshot is None:
            report.error = "its agent has no rank any more"
    except (OSError, ValueError, DistError) as error:
        report.error = _no_answer(error, patience)
        report.process = process_state(report.pid) if report.local else ""


def fetch_snapshot(url: str, token: str, seconds: float) -> Snapshot | None:
    """Return the snapshot of the rank at an agent; None if the agent has no rank.

    Args:
        url: base URL of the agent.
        token: the job's credential.
        seconds: time limit of everything.

    Raises:
        OSError: the agent cannot be reached, or does not answer in time (TimeoutError).
        DistError: it has another token, or does not know snapshots.
        ValueError: the document is invalid.
    """
    deadline = Deadline(seconds)
    with connect(url, seconds, token) as sock:
        refusal = AuthenticationError(f"the agent at {url} has another token than the gateway")
        Handshake(sock, Service.SNAPSHOT, client_script(hello(token), refusal), client=True).run(deadline.remaining())
        document = bytearray()
        while True:
            sock.settimeout(max(1e-3, deadline.remaining()))
            chunk = sock.recv(_CHUNK_BYTES)
            if not chunk:
                break
            document += chunk
            if deadline.expired():
                raise TimeoutError
            if len(document) > MAX_SNAPSHOT_BYTES:
                raise ValueError("the snapshot is too large")
    found = json_text.loads(document)
    if found is not None and not isinstance(found, dict):
        raise ValueError("the snapshot is not an object")
    return found


def _no_answer(error: Exception, patience: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {patience:g} s"
    return getattr(error, "message", "") or getattr(error, "strerror", "") or str(error) or type(error).__name__


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the state letter of a process on this host; ``-`` if there is none, empty if it cannot be read.

    Args:
        pid: the process.
        proc: mount point of procfs.
    """
    try:
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "-"
    except (OSError, IndexError):
        return ""
