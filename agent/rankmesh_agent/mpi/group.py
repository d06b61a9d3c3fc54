"""Set-up of a group's MPI backend; all members get one, or all raise."""

from __future__ import annotations

import json
from concurrent.futures import Future, wait
from typing import Any

from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.collectives.all_gather import gather_payloads
from rankmesh_agent.collectives.link import Link
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.mpi.backend import MpiBackend, raise_failure
from rankmesh_agent.mpi.library import fault_classes, mpi
from rankmesh_agent.net.deadline import in_thread
from rankmesh_agent.wire.errors import DistBackendError, DistError

_THREAD = "rankmesh-mpi-group"
"""Calls of MPI that wait for a rank which may not come: nothing interrupts them."""
_TAGS = 1 << 15
"""Number of tags that every MPI library supports."""
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 0.5
"""Time that a call of MPI has to end after the loss of a member."""
_survivors: tuple[Any, frozenset[int]] | None = None
"""Communicator and ranks of MPI's world that have survived a death; groups are made from it."""
_shrinking: Future[Any] | None = None
"""A Shrink whose group's set-up has ended before it, and which the next set-up goes on with."""


def use_mpi(group: LocalCommunicator, compare_calls: bool) -> None:
    """Run a group's collectives and messages in MPI from now on; a synchronous collective call.

    Args:
        compare_calls: whether this member requests that calls are compared.

    Raises:
        DistBackendError: a member has no MPI, the members are not all in one MPI job, or MPI makes no communicator
            after a death; raised at all of them.
    """
    made: list[tuple[Any, bool]] = []
    # A call over messages with a number of its own: those of the group's first set-up may still be on their way.
    group.use_backend(CpuBackend(group.link))
    group.set_up(
        lambda link: made.append(_create_communicator(link, group, compare_calls)), group.timeout, " over MPI", None
    )
    group.use_backend(MpiBackend(group, *made[0]))


def _create_communicator(link: Link, group: LocalCommunicator, compare_calls: bool) -> tuple[Any, bool]:
    """Return mpi4py's communicator of a group, and whether any member requests that calls are compared."""
    try:
        MPI, why = mpi(), ""  # noqa: N806  # mpi4py's usual name
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    except DistBackendError as error:
        why, rank, size = error.message, 0, 0
    # A rank that left is alive in MPI_Finalize, where it waits for the others.
    dead = [peer for peer, end in group.engine.lost_peers.items() if end.died]
    mine = json.dumps({"rank": rank, "size": size, "why": why, "compares": compare_calls, "dead": dead}).encode()
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
        parent = _parent(group, ranks, {peer for member in members for peer in member["dead"]})
        comm = _finish(in_thread(_THREAD, parent.Create_group, mpi_group, group.id % _TAGS), group)
    except MPI.Exception as error:
        if error.Get_error_class() in fault_classes():
            raise_failure(group)
        raise DistBackendError(f"MPI cannot make the communicator of group {group.name!r}: {error}") from error
    finally:
        mpi_group.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm, any(member["compares"] for member in members)


def _parent(group: LocalCommunicator, ranks: list[int], dead: set[int]) -> Any:
    """Return a communicator without dead ranks for the ranks of a group: MPI makes none from another one."""
    global _survivors, _shrinking
    world = mpi().COMM_WORLD
    parent, living = _survivors or (world, frozenset(range(world.size)))
    if not fault_classes() or not dead & living:
        return parent
    others = sorted(living - dead - set(ranks))
    if others or ranks != list(group.ranks):
        raise DistBackendError(
            f"after the death of ranks {sorted(dead & living)} MPI makes its next group of all ranks that live, but "
            f"ranks {others} of MPI's world are not in this one: shrink the default group by the dead ranks alone"
        )
    if _shrinking is None:
        parent.Revoke()  # ends the calls of an attempt that another death has ended
        _shrinking = in_thread(_THREAD, parent.Shrink)
    parent, _shrinking = _finish(_shrinking, group), None
    parent.Set_errhandler(mpi().ERRORS_RETURN)
    positions = parent.group.Translate_ranks(None, world.group)
    _survivors = parent, frozenset(positions)
    if not set(ranks) <= set(positions):
        raise_failure(group)
    return parent


def _finish(future: Future[Any], group: LocalCommunicator) -> Any:
    """Return the result of a call of MPI; raise once a member is lost, or at the deadline of the group's set-up."""
    others = [member for member in range(group.size) if member != group.rank]
    while not wait([future], _POLL_SECONDS).done:
        try:
            group.state.check(lambda: others)
        except DistError:
            if not wait([future], _GRACE_SECONDS).done:  # a member that has left may have done its part before
                raise
    return future.result()
