"""Reports on all ranks of the jobs at a gateway, with the snapshots of their agents."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import FAILED, CommandError
from rankmesh_agent.net.host import host_id
from rankmesh_gateway.diagnosis.reports import RankReport, newest_ranks
from rankmesh_gateway.diagnosis.snapshots import add_snapshots


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
    found = gateway.get("/v1/snapshot")
    try:
        reports = newest_ranks(found["ranks"], host_id(shm_dir), job, ranks)
        groups = list(found["groups"])
    except (KeyError, TypeError):
        raise CommandError(
            f"the gateway at {gateway.url} answers in a form this command does not know: their versions differ; use "
            "the same RankMesh at both ends",
            FAILED,
        ) from None
    add_snapshots(reports, gateway.token, patience)
    return reports, groups
