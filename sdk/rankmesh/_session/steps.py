"""Steps of a program: mark_step, and straggler_report, the ranks that make the others wait in them."""

from __future__ import annotations

import contextlib
from itertools import count
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rankmesh._session.session import require_session
from rankmesh_agent.agent import Agent
from rankmesh_agent.membership.gateway_client import GatewayClient, UnavailableError
from rankmesh_agent.wire.errors import GatewayUnreachableError

if TYPE_CHECKING:
    from rankmesh_gateway.schemas import Straggler

_numbers = count()
_MIN_SECONDS = 0.1
_ANSWER_SECONDS = 20.0
"""Time in which the gateway answers: it asks all ranks."""


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


def straggler_report(seconds: float = 60.0) -> list[Straggler]:
    """Return the ranks that make the others wait, the worst first, as ``rankmesh stragglers`` prints them.

    The gateway compares the calls that the flight recorders of all ranks keep. One rank asks, now and then: with a few
    ranks it takes some ten milliseconds. It finds no slow links: the command does, as it watches all ranks.
    Each Straggler has the ``ranks``, the share of the time that the others have ``lost`` by them, the seconds ``since``
    when, and ``why``, a sentence; see there for the rest.

    Args:
        seconds: only the calls of the last seconds count.

    Raises:
        ValueError: init_process_group has not been called; or ``seconds`` is less than 0.1.
        GatewayUnreachableError: the gateway does not answer.

    Source: our own.
    """
    from rankmesh_gateway.schemas import StragglerReport  # only here: a program that does not ask need not load it

    if not seconds >= _MIN_SECONDS:
        raise ValueError(f"seconds={seconds!r}, but the report is of the last {_MIN_SECONDS} seconds at least")
    session = require_session()
    query = urlencode({"job": session.rendezvous.job, "seconds": seconds})
    with contextlib.closing(GatewayClient(session.rendezvous.find, session.token)) as gateway:
        gateway.locate()
        try:
            return gateway.read(StragglerReport, f"stragglers?{query}", seconds=_ANSWER_SECONDS).stragglers
        except UnavailableError as error:
            raise GatewayUnreachableError(
                f"the gateway at {gateway.url} does not say which ranks are late: {error}", address=gateway.url or None
            ) from error
