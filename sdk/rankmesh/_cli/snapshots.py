"""Reports on the ranks of an overview, with the snapshots of their agents."""

from __future__ import annotations

from collections.abc import Collection

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.overview import Overview
from rankmesh_agent.net.host import host_id
from rankmesh_gateway.diagnosis.reports import RankReport, newest_ranks
from rankmesh_gateway.diagnosis.snapshots import add_snapshots


def fetch_reports(
    gateway: ServiceClient, overview: Overview, patience: float, shm_dir: str, ranks: Collection[int] = ()
) -> list[RankReport]:
    """Return the ranks of the newest epoch of each job, with their snapshots; those that have left are not among them.

    Args:
        gateway: client of the gateway.
        overview: its overview.
        patience: seconds in which an agent must answer.
        shm_dir: directory of shared memory, part of the id of this host.
        ranks: only these, if not empty.
    """
    reports = newest_ranks(overview["ranks"], host_id(shm_dir), ranks=ranks)
    add_snapshots(reports, gateway.token, patience)
    return reports
