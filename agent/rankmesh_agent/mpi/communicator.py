"""Creation of a group's MPI communicator; all members get one, or all raise."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.wire.errors import DistBackendError

_TAGS = 1 << 15
"""Number of tags that every MPI library supports."""


class MpiCommunicator(NamedTuple):
    """A group's MPI communicator.

    Attributes:
        comm: mpi4py's communicator, with the group's ranks.
        compare_calls: whether the members compare their calls, as one of them requests.
    """

    comm: Any
    compare_calls: bool


def create_communicator(link: Link, group: int, compare_calls: bool) -> MpiCommunicator:
    """Create a communicator of the members; a collective call.

    Args:
        link: messages among the members; a call has begun on it.
        group: id of the group, equal at all members.
        compare_calls: whether this member requests that calls are compared.

    Raises:
        DistBackendError: a member has no MPI, or the members are not all in one MPI job; raised at all of them.
    """
    try:
        MPI, why = mpi(), ""  # noqa: N806  # mpi4py's usual name
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    except DistBackendError as error:
        why, rank, size = error.message, 0, 0
    mine = json.dumps({"rank": rank, "size": size, "why": why, "compares": compare_calls}).encode()
    members = [json.loads(bytes(payload)) for payload in link.all_exchange(mine)]
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
    return MpiCommunicator(comm, any(member["compares"] for member in members))
