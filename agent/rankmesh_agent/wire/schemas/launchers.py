"""Bodies of the heartbeats by which the launchers of a job agree on its nodes and its restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rankmesh_agent.wire.fields import MAX_INTEGER, MAX_WORLD_SIZE, Body, Integer, Name, Text

LAUNCHER_SECONDS = 0.5
STARTING = -1
"""Attempt of a launcher that has not started any rank yet."""
NO_NODE = -1
"""Number of a node that the gateway is to assign, or that is not part of the attempt."""

_Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
_FromMinusOne = Annotated[int, Meta(ge=-1, le=MAX_INTEGER)]
_Nodes = Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
LauncherState = Literal["waiting", "running", "failed", "ended", "stopped", "closed"]


@dataclass
class LauncherHeartbeat(Body):
    """A launcher's report on its node, in a job whose nodes may change or that restarts after a failure.

    Attributes:
        job: its job.
        node: its node in the attempt; before that the one that it wants, NO_NODE if it has no preference.
        nodes: maximum number of nodes of the job.
        instance: random name of the launcher's process.
        attempt: of the node's ranks: how often the job's ranks had been started again; STARTING before that.
        state: of this attempt: ``waiting`` if no ranks run; ``running``; ``failed`` if one of its ranks has; ``ended``
            if all have, with success; ``stopped`` if the launcher ends; ``closed`` if it ends the job.
        max_restarts: how often the job may be restarted after a failure.
        min_nodes: minimum number of nodes; 0 if it is ``nodes``.
        nproc: ranks on each node; 0 if unknown.
        last_call: seconds that the others wait for more nodes once the minimum is there.
        attempt_nodes: nodes of the attempt; 0 before it.
        restarts: how many of the attempts began after a failure.
        hosts_gateway: whether the gateway is in the launcher's process.
        host: its host name, for messages.
        torchrun: whether it is a torchrun: its nodes have no numbers of their own, and it needs a store.
        awaits: the attempt of the last reply, of an earlier gateway perhaps; of a spare node the one before that.
    """

    job: Name
    node: _FromMinusOne
    nodes: _Nodes
    instance: Name
    attempt: _FromMinusOne
    state: LauncherState
    max_restarts: Integer
    min_nodes: _Count = 0
    nproc: _Count = 0
    last_call: Annotated[float, Meta(ge=0)] = 0.0
    attempt_nodes: _Count = 0
    restarts: _Count = 0
    hosts_gateway: bool = False
    host: Text = ""
    torchrun: bool = False
    awaits: _FromMinusOne = STARTING


@dataclass
class LauncherReply:
    """The state of the job.

    Attributes:
        attempt: the attempt that it is at; ranks of an earlier attempt are to be ended.
        over: whether no further attempt can follow: the job was stopped, its restarts are used up, or all nodes have
            ended, those included that are silent.
        node: this node's number in the attempt; NO_NODE if it is not part of it.
        nodes: nodes of the attempt; 0 while it waits for nodes.
        restarts: see LauncherHeartbeat.
        reason: why the attempt began, empty for the first one; if the job has failed, why it is over.
        failed: whether the job is over because of a failure.
        membership: whether the attempt began because the nodes have changed, not because a rank has failed.
        missing: while the attempt waits for nodes: which are there, and what is missing.
        store: id of the store that the torchruns of a job share; empty for other launchers.
    """

    attempt: Integer
    over: bool
    node: Integer = NO_NODE
    nodes: Integer = 0
    restarts: Integer = 0
    reason: str = ""
    failed: bool = False
    membership: bool = False
    missing: str = ""
    store: str = ""
