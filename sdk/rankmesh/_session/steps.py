"""mark_step: where the steps of a program begin, for traces."""

from __future__ import annotations

from itertools import count

from rankmesh._session.session import require_session
from rankmesh_agent.agent import Agent

_numbers = count()


def mark_step(number: int | None = None) -> None:
    """Mark the begin of a step of the program, for ``rankmesh trace --steps``. It costs about a microsecond.

    An agent in another process, which this one is attached to, does not keep marks.

    Args:
        number: of the step; by default they are counted from 0 on.

    Raises:
        ValueError: init_process_group has not been called.

    Source: our own; torch.profiler marks steps of its own traces.
    """
    agent = require_session().agent
    number = next(_numbers) if number is None else number
    if isinstance(agent, Agent):
        agent.recorder.mark_step(agent.world.state, number)
