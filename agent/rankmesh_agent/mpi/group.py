"""Set-up of a group's MPI backend; all members get one, or all raise."""

from __future__ import annotations

import json
from typing import Any

from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.collectives.all_gather import gather_payloads
from rankmesh_agent.collectives.link import Link
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.mpi.backend import MpiBackend
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.wire.errors import DistBackendError

_TAGS = 1 << 15
"""Number of tags that every MPI library supports."""


def use_mpi(group: LocalCommunicator, compare_calls: bool) -> None:
    """Run a group's collectives and messages in MPI from now on; a synchronous collective call.

    Args:
        group: the group.
        compare_calls: whether this member requests that calls are compared.

    Raises:
        DistBackendError: a member has no MPI, or the members are not all in one MPI job; raised at all of them.
    """
    made: list[tuple[Any, bool]] = []
    # A call over messages with a number of its own: those of the group's first set-up may still be on their way.
    group.use_backend(CpuBackend(group.link))
    group.set_up(
        lambda link: made.append(_create_communicator(link, group.id, compare_calls)), group.timeout, " over MPI", None
    )
    group.use_backend(MpiBackend(group, *made[0]))


def _create_communicator(link: Link, group: int, compare_calls: bool) -> tuple[Any, bool]:
    """Create mpi4py's communicator of the members; a collective call.

    Args:
        link: messages among the members; a call has begun on it.
        group: id of the group, equal at all members.
        compare_calls: whether this member requests that calls are compared.

    Returns:
        The communicator, with the group's ranks, and whether any member requests that calls are compared.

    Raises:
        DistBackendError: a member has no MPI, or the members are not all in one MPI job; raised at all of them.
    """
    try:
        MPI, why = mpi(), ""  # noqa: N806  # mpi4py's usual name
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    except DistBackendError as error:
        why, rank, size = error.message, 0, 0
    mine = json.dumps({"rank": rank, "size": size, "why": why, "compares": compare_calls}).encode()
    members = [json.loads(bytes(payload)) for payload in gather_payloads(link, mine)]
    for group_rank, member in enumerate(members):
        if member["why"]:
            raise DistBackendError(f"{member['why']} (group rank {group_rank})")
    ranks, sizes = [member["rank"] for member in members], [member["size"] for member in members]
    if len(set(ranks)) < len(ranks) or len(set(sizes)) > 1:
        raise DistBackendError(
            f"backend 'mpi' needs all members in one MPI job, but their ranks in MPI's world are {ranks} of "
            f"{sizes}: start the program once, with mpirun -n {len(ranks)} python script.py"
        )
    mpi_group = MPI.COMM_WORLD.group.Incl(ranks)
    try:
        comm = MPI.COMM_WORLD.Create_group(mpi_group, group % _TAGS)
    finally:
        mpi_group.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm, any(member["compares"] for member in members)
