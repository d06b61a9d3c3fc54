"""Barrier of messages, which an agent can execute for an attached process, too: that makes its collectives itself."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options

_TAG = -1
"""A tag that no message of the user has."""


def message_barrier(group: Communicator, seconds: float) -> None:
    """Wait until all members of a group have made the call.

    By dissemination, in log2 n rounds: Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988.

    Args:
        group: the group.
        seconds: time limit of each round.

    Raises:
        DistBackendError: a member did not come, or failed.
    """
    nothing, options, distance = np.empty(0, np.uint8), Options(seconds), 1
    while distance < group.size:
        target, source = ((group.rank + step) % group.size for step in (distance, -distance))
        work = group.send(nothing, group.ranks[target], _TAG, options._replace(async_op=True))
        group.receive(nothing, group.ranks[source], _TAG, options)
        if work is not None:
            work.wait()
        distance *= 2
