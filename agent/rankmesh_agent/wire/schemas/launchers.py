"""Bodies of the heartbeats by which the launchers of a job agree on its restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankmesh_agent.wire.fields import Boolean, Integer, Name

LAUNCHER_SECONDS = 0.5
"""Interval of a launcher's heartbeats."""
STARTING = -1
"""Attempt of a launcher that has not started any rank yet."""

LauncherState = Literal["running", "failed", "ended", "stopped"]


@dataclass
class LauncherHeartbeat:
    """A launcher's report on its node, in a job that restarts after a failure.

    Attributes:
        job: its job.
        node: its node.
        nodes: nodes of the job.
        instance: random name of the launcher's process.
        attempt: how often the job had been restarted when the launcher started its ranks; STARTING before that.
        state: of this attempt: ``running``; ``failed`` if one of its ranks has; ``ended`` if all have, with success;
            ``stopped`` if a signal has ended the launcher.
        max_restarts: how often the job may be restarted.
    """

    job: Name
    node: Integer
    nodes: Integer
    instance: Name
    attempt: Integer
    state: LauncherState
    max_restarts: Integer


@dataclass
class LauncherReply:
    """The state of the job.

    Attributes:
        attempt: how often it has been restarted; ranks of an earlier attempt are to be ended.
        over: whether it will not be restarted any more: it was stopped, its restarts are used up, or all nodes have
            ended, those included that are silent.
    """

    attempt: Integer
    over: Boolean
