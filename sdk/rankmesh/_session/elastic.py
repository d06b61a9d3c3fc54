"""Growth of the world while the job runs, and callbacks for failures of ranks."""

from __future__ import annotations

from datetime import timedelta

import numpy as np

from rankmesh._session.backend import check_growth
from rankmesh._session.callbacks import FailureCallback, RemovableHandle
from rankmesh._session.process_group import ProcessGroup
from rankmesh._session.ranks import as_int
from rankmesh._session.session import Session, require_session
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import seconds_of
from rankmesh_agent.net.descriptors import convert_emfile
from rankmesh_agent.wire.errors import GatewayUnreachableError
from rankmesh_agent.wire.fields import MAX_WORLD_SIZE

_UNKNOWN = -1
_ASK_SECONDS = 10.0
"""Time limit of the question which processes wait."""


def grow_group(world_size: int | None = None, timeout: timedelta | float | None = None) -> ProcessGroup:
    """Make the world larger, by processes that join the running job: the opposite of shrink_group.

    A collective call of the default group. The processes come by ``init_process_group(join=True)``, before or after
    this call. The ranks keep their order, from 0, and the new ones come behind them, in the order in which they joined.
    All of them begin a new epoch of the job, with a new default group; all other groups end. The job's store keeps its
    values and queues, but for changes that other threads and programs make during the call, which may be lost; a call
    that waits for a key meanwhile fails.

    If the call fails, the default group and all others are what they were, and it can be repeated. Only if a process
    dies in the last moments of the call, when all ranks have connected, it may have succeeded at some ranks; then their
    next calls and those of the others raise RankFailedError, as after any other death.

    Args:
        world_size: number of ranks in the larger world; the call waits for as many new ones as it takes. None: all
            processes that wait when rank 0 makes the call, and it returns at once if there are none.
        timeout: limit for the call, timedelta or seconds; the default group's if None. Once all ranks are there, they
            get 5 seconds at least to connect.

    Returns:
        The default group: a new one, or if no process waits to join and none is missing, the present one.

    Raises:
        TypeError: ``world_size`` is no integer.
        ValueError: init_process_group has not been called; the world is larger than ``world_size``, which also must not
            exceed 65536; or the backend is MPI, whose worlds cannot grow.
        JoinTimeoutError: ranks or new processes are missing when the timeout expires; names them.
        RankFailedError: a rank failed or left meanwhile; names it.
        WorldSizeMismatchError: the ranks call for different sizes.
        GatewayUnreachableError: the gateway does not answer.
        Exception: the creator of a registered backend failed for the larger world, which has taken the other's place.

    Source: our own; torch.distributed has shrink_group only.
    """
    session = require_session()
    world = session.group._communicator
    check_growth(session.engines)
    seconds = seconds_of(timeout, world.timeout)
    if world_size is None:
        size = world.size + _num_waiting(session, seconds)
    else:
        size = as_int(world_size, "world_size")
        if not world.size <= size <= MAX_WORLD_SIZE:
            raise ValueError(
                f"world_size={size}, but the world has {world.size} ranks and may have {MAX_WORLD_SIZE}; shrink_group "
                "makes it smaller"
            )
    if size == world.size:
        return session.group
    with convert_emfile("this rank cannot join the larger world"):
        return session.grow(size, seconds)


def _num_waiting(session: Session, seconds: float) -> int:
    """Return how many processes wait to join, as rank 0 has it from the gateway."""
    world = session.group._communicator
    count = np.array([_UNKNOWN], np.int64)
    failure: BaseException | None = None
    if world.rank == 0:
        try:
            waiting = session.agent.num_waiting(min(seconds / 2, _ASK_SECONDS))  # the others wait in the broadcast
            count[0] = min(waiting, MAX_WORLD_SIZE - world.size)
        except BaseException as error:  # Ctrl-C, too: after the broadcast
            failure = error
    world.broadcast(count, 0, Options(seconds))
    if failure is not None:
        raise failure
    if count[0] == _UNKNOWN:
        raise GatewayUnreachableError(
            "rank 0 could not ask the gateway which processes wait to join; its error has why"
        )
    return int(count[0])


def on_failure(callback: FailureCallback) -> RemovableHandle:
    """Have a function called as soon as this rank knows that a rank of the default group has failed.

    It is called once for each failed rank, while this rank computes or waits in a call, in a thread that all callbacks
    share; calls of the group that wait for the rank fail by themselves. So it is for what cannot wait until then: to
    set a flag, to end a computation, to write a log. It should not make calls that wait for other ranks. An exception
    that it raises is logged. After shrink_group and grow_group it is called for ranks of the new world; it ends with
    destroy_process_group.

    Args:
        callback: called with the RankFailedError that a call would raise; its ``ranks`` are the failed ones.

    Returns:
        A handle whose ``remove()`` unregisters the callback.

    Raises:
        TypeError: ``callback`` is not callable.
        ValueError: init_process_group has not been called.
    """
    if not callable(callback):
        raise TypeError(f"callback must be a function of the error, got {callback!r}")
    return require_session().callbacks.add(callback)
