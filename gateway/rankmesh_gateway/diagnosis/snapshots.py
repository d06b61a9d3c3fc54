"""Snapshots of ranks, fetched from their agents at once."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from rankmesh_agent.diagnostics import process
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.dial import connect
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import AuthenticationError, DistError
from rankmesh_agent.wire.hello import Service, client_script, hello
from rankmesh_agent.wire.snapshot import MAX_SNAPSHOT_BYTES, RUNNING, ProcessView, RankSnapshot, rank_attachment
from rankmesh_gateway.diagnosis.reports import RankReport, Snapshot

_CONCURRENCY = 128
_CHUNK_BYTES = 1 << 18
_STOPPED_SECONDS = 0.2
"""Seconds in which the agent of a stopped process must answer: it cannot."""
_OBSERVED_SECONDS = 4.0
"""Seconds for which an observer may look at its rank, besides those in which it must answer."""


def add_snapshots(
    reports: Sequence[RankReport],
    token: str,
    patience: float,
    limit: float = math.inf,
    neighbours: Sequence[RankReport] = (),
    service: Service = Service.SNAPSHOT,
) -> None:
    """Ask the agents of ranks for their snapshots, at once, and add these to the reports, or the errors.

    Args:
        patience: seconds in which an agent must answer; ``limit``: in which all of them must.
        neighbours: all ranks; those on the hosts of ranks that do not answer are asked about these.
        service: SNAPSHOT; RECORDS, whose snapshots have more calls; or WAITS.
    """
    if not reports:
        return
    end = Deadline(limit)
    pool = ThreadPoolExecutor(min(_CONCURRENCY, len(reports)), "rankmesh-diagnosis")
    try:
        list(pool.map(lambda report: _add_snapshot(report, service, token, patience, end), reports))
        silent = {report.rank: report for report in reports if report.error and report.rank >= 0}
        unseen = [report for report in silent.values() if not report.outside.state]
        asked = [each for each in neighbours if each.rank not in silent and each.state == "alive"]
        list(pool.map(lambda report: _ask_neighbour(report, asked, token, patience), unseen))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _add_snapshot(report: RankReport, service: Service, token: str, patience: float, end: Deadline) -> None:
    if report.state == "joining":
        report.error = "it waits for its world to join"
        return
    if report.observed and service is not Service.SNAPSHOT:
        report.error = "its calls are not known: 'rankmesh observe' looks from outside"
        return
    if end.expired():
        report.error = f"not asked: others have not answered within {end.seconds:g} s"
        return
    stopped = report.local and process.state_of(report.pid) in ("T", "t")
    limit = min(end.remaining(), patience, _STOPPED_SECONDS if stopped else patience)
    try:
        report.asked = time.time()
        if report.observed:
            credential, attachment = for_job(token, report.job), rank_attachment(report.rank)
            found = fetch_snapshot(report.url, credential, limit + _OBSERVED_SECONDS, Service.PROCESS, attachment)
            _add_view(report, json_text.convert(ProcessView, found))
        else:
            report.snapshot = fetch_snapshot(report.url, for_job(token, report.job), limit, service)
        report.answered = time.time()
        if report.snapshot is None and not report.error:
            report.error = "its agent has no rank any more"
    except (OSError, ValueError, TypeError, DistError) as error:
        report.error = _no_answer(error, patience)
        if report.local:
            report.outside = process.view(report.pid, patience)
            if report.observed:
                _add_view(report, report.outside)


def _add_view(report: RankReport, view: ProcessView) -> None:
    """Add the view of an observed rank's process: as a snapshot if it runs, and has stacks."""
    report.outside = view
    if view.state in RUNNING and view.stacks and not view.frozen:
        place = report.job, report.epoch, report.rank
        report.snapshot = asdict(RankSnapshot(*place, attached=False, stacks=view.stacks, unchanged=view.unchanged))
    elif view.state in ("-", "Z", "X"):
        report.state = "left"  # its observer is about to report how
    else:
        report.error = view.no_stacks or "its process does not run"


def _ask_neighbour(report: RankReport, others: Sequence[RankReport], token: str, patience: float) -> None:
    """Let another rank of its job on its host look at the process of a rank that does not answer."""
    place = report.job, report.host_id
    other = next((each for each in others if (each.job, each.host_id) == place), None)
    if other is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, DistError):
            attachment = rank_attachment(report.rank)
            found = fetch_snapshot(other.url, for_job(token, report.job), patience, Service.PROCESS, attachment)
            report.outside = json_text.convert(ProcessView, found)


def fetch_snapshot(
    url: str, token: str, seconds: float, service: Service = Service.SNAPSHOT, attachment: bytes = b""
) -> Snapshot | None:
    """Return the document that a service of an agent sends: a snapshot; None if the agent has no such rank."""
    deadline = Deadline(seconds)
    with connect(url, seconds, token) as sock:
        refusal = AuthenticationError(f"the agent at {url} has another token than the gateway")
        Handshake(sock, service, client_script(hello(token, attachment), refusal), client=True).run(
            deadline.remaining()
        )
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
