"""Snapshots of all ranks of the jobs at a gateway, fetched from their agents at once."""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import FAILED, CommandError
from rankmesh._cli.reports import RankReport, Snapshot
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.upgrade import connect_upgraded
from rankmesh_agent.transports.shared_memory import host_id
from rankmesh_agent.wire.errors import AuthenticationError, DistError
from rankmesh_agent.wire.handshake import client_script
from rankmesh_agent.wire.snapshot import MAX_SNAPSHOT_BYTES, UPGRADE

_CONCURRENCY = 128
_CHUNK_BYTES = 1 << 18
_STOPPED_SECONDS = 0.2
"""Seconds in which the agent of a stopped process must answer: it cannot."""


def fetch_reports(
    gateway: ServiceClient, job: str, patience: float, shm_dir: str, ranks: Collection[int] = ()
) -> tuple[list[RankReport], list[dict[str, Any]]]:
    """Return the ranks of the newest epoch of each job, with their snapshots, and all groups as the gateway lists them.

    Ranks that have left are not among them.

    Args:
        gateway: client of the gateway.
        job: only this job, if not empty.
        patience: seconds in which an agent must answer.
        shm_dir: directory of shared memory, part of the id of this host.
        ranks: only these, if not empty.

    Raises:
        CommandError: the gateway does not answer, or in another form.
    """
    here = host_id(shm_dir)
    local: dict[int, bool] = {}
    reports = []
    try:
        found = gateway.get("/v1/snapshot")
        listed = [each for each in found["ranks"] if job in ("", each["job"])]
        groups = list(found["groups"])
        newest: dict[str, int] = {}
        for each in listed:
            newest[each["job"]] = max(each["epoch"], newest.get(each["job"], 0))
        for each in listed:
            member = each["member"]
            if (
                each["epoch"] < newest[each["job"]]
                or each["state"] == "left"
                or (ranks and member["rank"] not in ranks)
            ):
                continue
            place = each["job"], each["epoch"], member["rank"], member["host"], member["pid"], member["http"]
            report = RankReport(*place, each["state"], each["reason"], each["heartbeat_age"])
            local[id(report)] = member["host_id"] == here
            reports.append(report)
    except (KeyError, TypeError):
        raise CommandError(
            f"the gateway at {gateway.url} answers in a form this command does not know: their versions differ; use "
            "the same RankMesh at both ends",
            FAILED,
        ) from None

    def fetch(report: RankReport) -> None:
        if report.state == "joining":
            return
        stopped = local[id(report)] and process_state(report.pid) in ("T", "t")
        limit = min(patience, _STOPPED_SECONDS) if stopped else patience
        try:
            report.snapshot = fetch_snapshot(report.url, gateway.token, limit)
            if report.snapshot is None:
                report.error = "its agent has no rank any more"
        except (OSError, ValueError, DistError) as error:
            report.error = _no_answer(error, patience)
            report.process = process_state(report.pid) if local[id(report)] else ""

    if reports:
        pool = ThreadPoolExecutor(min(_CONCURRENCY, len(reports)))
        try:
            list(pool.map(fetch, reports))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return reports, groups


def fetch_snapshot(url: str, token: str, seconds: float) -> Snapshot | None:
    """Return the snapshot of the rank at an agent; None if the agent has no rank.

    Args:
        url: base URL of the agent.
        token: the job's token.
        seconds: time limit of everything.

    Raises:
        OSError: the agent cannot be reached, or does not answer in time (TimeoutError).
        DistError: it has another token, or does not know snapshots.
        ValueError: the document is invalid.
    """
    deadline = Deadline(seconds)
    sock, _ = connect_upgraded(url, UPGRADE, connect_seconds=seconds, seconds=seconds)
    with sock:
        refusal = AuthenticationError(f"the agent at {url} refuses the token given")
        handshake = Handshake(sock, client_script(token, refusal))
        try:
            handshake.run(deadline.remaining())
        finally:
            handshake.close()
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
    found = json.loads(document)
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
