"""Agent of an attached process: one rank of a job, carried by a standalone agent, with the interface of agent.Agent."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.host import host_id
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.remote.address import socket_path
from rankmesh_agent.remote.client import CONTROL_SECONDS, AgentClient, AgentDialer
from rankmesh_agent.remote.codec import GroupDescription, Joined, error_data, error_from
from rankmesh_agent.remote.communicator import RemoteCommunicator
from rankmesh_agent.remote.requests import (
    Abort,
    Acquire,
    DropGroup,
    FailedRanks,
    Failure,
    Grow,
    LostRanks,
    NewGroup,
    NumWaiting,
    RecordFailure,
    Release,
    StoreCommand,
)
from rankmesh_agent.store import codec
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.store import Store, response_seconds
from rankmesh_agent.wire.errors import DistBackendError, DistError, DistNetworkError, RankFailedError
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import AgentHeartbeat, LeaseTerms

T = TypeVar("T")
_WATCH_SECONDS = 0.2
"""Interval at which a process that has callbacks for failures asks its agent for them."""
_MAX_CONNECT_SECONDS = 60.0
"""Time that the ranks of a larger world may take to connect, after all have come."""
_MIN_JOIN_SECONDS = 1.0
"""Least time for the join, however late an agent is found: all other ranks may have joined."""


class RemoteAgent:
    """One rank of a job, from the lease of its agent to the release.

    Args:
        terms: of the lease, without holder and the time of the join; ``member.rank`` has the rank.

    Raises:
        AgentTakenError: another process has the agent.
        DistNetworkError: the agent cannot be reached, or the join failed; the subclass and the message have the cause.
    """

    def __init__(self, settings: Settings, offer: AgentHeartbeat, terms: LeaseTerms, deadline: Deadline) -> None:
        self.settings = settings
        same_host = offer.host_id == host_id(settings.shm_dir)
        path = socket_path(settings.shm_dir, offer.id) if same_host else ""
        self._client = AgentClient(offer, AgentDialer(offer, path, settings.job, settings.job_token))
        self._groups: list[RemoteCommunicator] = []
        self._notify: Callable[[DistBackendError], None] = lambda error: None
        self._watchdog = Watchdog("rankmesh-failures-of-agent", CONTROL_SECONDS)
        holder, seconds = f"pid {os.getpid()} on {socket.gethostname()}", max(deadline.remaining(), _MIN_JOIN_SECONDS)
        joined = self._client.acquire(Acquire(replace(terms, holder=holder, join_seconds=seconds)), deadline)
        with contextlib.ExitStack() as undo:
            undo.callback(self._client.close)
            self._enter(joined)
            undo.pop_all()

    def _enter(self, joined: Joined) -> None:
        """Enter the epoch that the agent has joined."""
        self.members = {member.rank: member for member in joined.members}
        self.member = self._client.member = self.members[joined.rank]
        self.world = self._make_group(joined.world)

    def num_waiting(self, seconds: float) -> int:
        return self._client.ask(NumWaiting(seconds), seconds)

    def grow(self, world_size: int, seconds: float) -> RemoteAgent:
        """See Agent.grow; returns this object, whose agent has joined the epoch and left the one before."""
        joined = self._client.ask(Grow(world_size, seconds), seconds + _MAX_CONNECT_SECONDS)
        before, self._groups[:] = self._groups.copy(), []
        for group in before:
            group.close()
        self._enter(joined)
        return self

    def watch_failures(self, notify: Callable[[DistBackendError], None]) -> None:
        """See Agent.watch_failures; ``notify`` is called by a thread that asks the agent."""
        self._notify = notify
        self._watchdog.add(self._report_lost_ranks)

    def _report_lost_ranks(self) -> float | None:
        try:
            lost = self._client.ask(LostRanks())
        except RankFailedError as error:  # the agent is gone
            for group in self._groups.copy():
                group.state.fail(error)
            return None
        except DistError:  # the next call raises it
            lost = []
        for failure in map(error_from, lost):
            if isinstance(failure, DistBackendError):
                self._notify(failure)
        return _WATCH_SECONDS

    @property
    def failed_ranks(self) -> list[int]:
        with contextlib.suppress(DistError):  # the agent is gone
            return self._client.ask(FailedRanks())
        return []

    def failure_naming(self, ranks: Collection[int]) -> DistError | None:
        return self._client.failure(Failure(naming=list(ranks)))

    def record_failure(self, group: Communicator, error: DistError) -> None:
        with contextlib.suppress(DistError):  # the agent is gone
            self._client.ask(RecordFailure(group.id, error_data(error)))

    def new_group(
        self, ranks: Sequence[int], timeout: float, global_ranks: Sequence[int] | None = None
    ) -> RemoteCommunicator:
        numbers = list(ranks if global_ranks is None else global_ranks)
        try:
            description = self._client.ask(NewGroup(list(ranks), timeout, numbers), timeout)
        except BaseException as error:
            if not isinstance(error, DistError):  # Ctrl-C, say
                with contextlib.suppress(DistError):
                    self._client.ask(Abort(error_data(error)))
            raise
        return self._make_group(description, numbers)

    def _make_group(
        self, description: GroupDescription, global_ranks: Sequence[int] | None = None
    ) -> RemoteCommunicator:
        group = RemoteCommunicator(self._client, description)
        if global_ranks is not None:
            group.state.renumber(tuple(global_ranks))
        self._groups.append(group)
        return group

    def drop_group(self, group: Communicator, how: Goodbye | None = None) -> None:
        self._groups[:] = [other for other in self._groups if other is not group]
        with contextlib.suppress(DistError):
            self._client.ask(DropGroup(group.id, None if how is None else how.encode()), CONTROL_SECONDS)
        group.close()

    def set_world(self, group: RemoteCommunicator) -> None:
        group.become_world()
        self.world = group

    def use_mpi(self, group: Communicator, compare_calls: bool) -> None:
        """Raise DistBackendError: the agent would make the calls of MPI."""
        raise DistBackendError(
            "backend 'mpi' needs the rank's agent in this process, which makes the calls of MPI: do not attach to a "
            "standalone agent (hosting=embedded)"
        )

    @property
    def store(self) -> Store:
        """The job's store, by way of the agent."""
        return SessionStore(self._client)

    def close(self, reason: str = "", *, raised: bool = False, exit_text: str = "", place: str = "") -> None:
        """See Agent.close: the agent leaves for this process, and is free again. Does nothing the second time."""
        if self._client.left:
            return
        with contextlib.ExitStack() as steps:  # all are taken, also if Ctrl-C ends one; the last is the first here
            steps.callback(self._client.close)
            steps.callback(self._groups.clear)
            for group in self._groups:
                steps.callback(group.close)
            steps.callback(self._watchdog.remove, self._report_lost_ranks)
            with interrupts_deferred():  # before anything that waits for a thread
                self._client.left = True
                for group in self._groups:
                    group.state.mark_destroyed()
                self._client.release(Release(reason, raised, exit_text, place))

    def end_in_child(self) -> None:
        """End the groups in a forked child, without a message to the agent."""
        self._client.left = True
        for group in self._groups:
            group.end_in_child()


class SessionStore(Store):
    """Store of an attached process's job, by way of its agent, the only one that the process need be able to reach."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        if timeout is None:
            timeout = response_seconds(command)
        request = bytes(codec.encode_command(command, 1, timeout=timeout))
        try:
            result = self._client.ask(StoreCommand(request), command.seconds + timeout)
        except RankFailedError as error:
            raise DistNetworkError(error.message, address=error.address) from error
        return codec.decode_result(command, result)
