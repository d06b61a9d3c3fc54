"""How the members of a group come to have an MPI communicator, or find out together that they cannot."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.wire.errors import DistBackendError

_TAGS = 1 << 15
"""Tags that every MPI library has."""


class MpiCommunicator(NamedTuple):
    """What came of it.

    Attributes:
        comm: the communicator, with the group's ranks.
        compares: whether one of the members wants them to compare their calls.
    """

    comm: Any
    compare_calls: bool


def create_communicator(link: Link, group: int, compares: bool) -> MpiCommunicator:
    """Make a communicator of the members; a collective call.

    Args:
        link: messages among the members; a call has begun on it.
        group: the group's id, equal at all of them.
        compares: whether this member wants that calls are compared.

    Raises:
        DistBackendError: a member has no MPI, or they are not all processes of one MPI job; at all of them.
    """
    try:
        MPI, why = mpi(), ""  # noqa: N806  # as everyone calls it
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    except DistBackendError as error:
        why, rank, size = error.message, 0, 0
    mine = json.dumps({"rank": rank, "size": size, "why": why, "compares": compares}).encode()
    said = [json.loads(bytes(payload)) for payload in link.all_exchange(mine)]
    for member, each in enumerate(said):
        if each["why"]:
            raise DistBackendError(f"{each['why']} (group rank {member})")
    ranks = [each["rank"] for each in said]
    if len(set(ranks)) < len(ranks) or len({each["size"] for each in said}) > 1:
        raise DistBackendError(
            f"backend 'mpi' needs all members in one MPI job, but their ranks in MPI's world are {ranks} of "
            f"{[each['size'] for each in said]}: start the program once, with mpirun -n {len(ranks)} python script.py"
        )
    members = MPI.COMM_WORLD.group.Incl(ranks)
    try:
        comm = MPI.COMM_WORLD.Create_group(members, group % _TAGS)
    finally:
        members.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiCommunicator(comm, any(each["compares"] for each in said))
