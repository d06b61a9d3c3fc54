"""Leases of a standalone agent: one at a time, each with an Agent that joins a job for its holder."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from rankmesh_agent.agent import Agent
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.job_membership import JoinTerms
from rankmesh_agent.net.deadline import Deadline, in_thread
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.errors import AgentTakenError, LeaseEndedError, NotLeasedError
from rankmesh_agent.wire.schemas import UNASSIGNED, Lease, LeaseState, LeaseTerms

_JOIN_END_SECONDS = 5.0
_log = logging.getLogger("rankmesh")


class ActiveLease:
    """A lease, and the Agent that joins a job for it; ``on_end`` is called with the reason when it has ended.

    Attributes:
        lease: the lease; its id is random, so a client cannot guess that of another client.
        joining: the Agent, done when the job's world is complete or the join has failed: with a LeaseEndedError if the
            lease was released meanwhile, or a DistNetworkError, as of Agent.
        end_reason: why the lease is being ended, or was; None while it lasts.
    """

    def __init__(self, terms: LeaseTerms, on_end: Callable[[str], None]) -> None:
        self.terms, self.on_end = terms, on_end
        self.lease = Lease(secrets.token_hex(16), terms.job, terms.rank, terms.world_size, terms.holder)
        self.joining: Future[Agent] = Future()
        self.agent: Agent | None = None
        self.end_reason: str | None = None
        self.last_used = time.monotonic()
        self.failure_logged = False


class LeaseManager:
    """Leases of one agent, by its name. For several threads.

    Args:
        on_change: called when the agent is leased, has joined, or is free again.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        find_gateway: Callable[[], str | None],
        *,
        host: str,
        http: HttpServer,
        on_change: Callable[[], None],
    ) -> None:
        self._name = name
        self._settings = settings
        self._find_gateway = find_gateway
        self._host = host
        self._http = http
        self._on_change = on_change
        self._lock = threading.Lock()
        self._active: ActiveLease | None = None
        self._closed = False

    @property
    def lease(self) -> Lease | None:
        """The current lease, None while the agent is free."""
        with self._lock:
            return self._active.lease if self._active is not None else None

    @property
    def agent(self) -> Agent | None:
        """The Agent that has joined a job, None while there is none."""
        active = self._active
        return active.agent if active is not None else None

    def current(self, grant: Grant | None = None) -> Agent:
        """Return the Agent that has joined a job, as a credential permits, and restart the lease's idle time.

        Raises:
            NotLeasedError: there is none.
            ForbiddenJobError: it has joined another job, or is leased for another rank.
        """
        with self._lock:
            active = self._active
            if active is None or active.agent is None:
                raise self._not_leased()
            if grant is not None:
                grant.require_lease(active.lease.job, active.lease.id)
            active.last_used = time.monotonic()
            return active.agent

    def state(self) -> LeaseState:
        """Return the lease, and whether it has joined its job; raise NotLeasedError if the agent is free."""
        with self._lock:
            if self._active is None:
                raise self._not_leased()
            return LeaseState(self._active.lease, "joining" if self._active.agent is None else "joined")

    def acquire(self, terms: LeaseTerms, on_end: Callable[[str], None] = lambda reason: None) -> ActiveLease:
        """Lease the agent, and have it join the job in a thread of its own; for the arguments see ActiveLease."""
        active = ActiveLease(terms, on_end)
        with self._lock:
            if self._closed:
                raise AgentTakenError(f"agent {self._name!r} is about to end; ask the gateway for another")
            if self._active is not None:
                current = self._active.lease
                hidden = self._settings.token and current.job != terms.job
                holder = "by another job" if hidden else _holder(current)
                raise AgentTakenError(f"agent {self._name!r} is taken, {holder}; ask the gateway for another")
            self._active = active
        _log.info("agent %r is leased %s", self._name, _holder(active.lease))
        self._on_change()
        in_thread("rankmesh-lease", self._join, active, into=active.joining)
        return active

    def grow(self, active: ActiveLease, world_size: int, seconds: float, check: Callable[[], None]) -> Agent:
        """Have the leased agent join the epoch of a larger world; return its successor there, see Agent.grow."""
        agent = active.agent
        if agent is None:
            raise self._ended("it was released")
        larger = agent.grow(world_size, seconds, check)
        try:
            check()
        except BaseException:
            larger.close("the client does not wait for the larger world any more")
            raise
        with self._lock:
            reason = active.end_reason
            if reason is None:
                active.agent = larger
                active.lease.rank, active.lease.world_size = larger.member.rank, world_size
        ended = agent if reason is None else larger
        ended.close(reason or "", exit_text="it called grow_group" if reason is None else "")
        if reason is not None:
            raise self._ended(reason)
        self._on_change()
        return larger

    def release(self, lease_id: str, reason: str = "", **how: Any) -> bool:
        """End a lease, and a join in progress; return whether there was such a lease. From any thread.

        The reason is for the job's other ranks; empty if the holder was done. See Agent.close.
        """
        with self._lock:
            active = self._active
            if active is None or active.lease.id != lease_id or active.end_reason is not None:
                return False
            active.end_reason = reason
            agent = active.agent
        if agent is not None:
            self._end(active, agent, reason, **how)
        return True

    def watch(self) -> None:
        """Log the first failure of the leased agent's job; end a lease that has not been used for its idle time."""
        active = self._active
        if active is None or active.end_reason is not None:
            return
        self._log_failure(active)
        agent, idle = active.agent, active.terms.idle
        if not idle or time.monotonic() - active.last_used < idle:
            return
        if agent is not None and any(group.inflight for group in agent.groups()):
            active.last_used = time.monotonic()
            return
        _log.warning("agent %r was not used for %g s: the lease ends", self._name, idle)
        self.release(active.lease.id, f"its HTTP client did not use it for {idle:g} s")

    def close(self, reason: str) -> bool:
        """End the lease, and accept no other; return whether that is new."""
        with self._lock:
            closed, self._closed = self._closed, True
            active = self._active
        if active is not None and not closed:
            self.release(active.lease.id, reason)
            wait([active.joining], _JOIN_END_SECONDS)
        return not closed

    def _join(self, active: ActiveLease) -> Agent:
        wanted, lease = active.terms, active.lease

        def check() -> None:
            if active.end_reason is not None:
                raise self._ended(active.end_reason)

        deadline = Deadline(wanted.timeout if wanted.join_seconds is None else wanted.join_seconds)
        terms = JoinTerms(
            wanted.rank, wanted.world_size, wanted.timeout, deadline, awaits_growth=wanted.awaits_growth, check=check
        )
        try:
            settings = replace(self._settings, job=wanted.job)
            agent = Agent(settings, self._find_gateway, terms, host=self._host, http=self._http)
        except BaseException as error:
            if active.end_reason is None:
                _log.warning("%s of job %r has not joined: %s", _rank(lease), wanted.job, error)
            self._free(active)
            check()
            raise
        with self._lock:
            lease.rank, lease.world_size = agent.member.rank, agent.world.size
            active.agent = agent
            reason = active.end_reason
        if reason is not None:
            self._end(active, agent, reason)
            raise self._ended(reason)
        _log.info("rank %d of job %r has joined: all %d ranks are there", lease.rank, lease.job, lease.world_size)
        self._on_change()
        return agent

    def _end(self, active: ActiveLease, agent: Agent, reason: str, **how: Any) -> None:
        self._log_failure(active)
        try:
            agent.close(reason, **how)
        finally:
            self._free(active)

    def _free(self, active: ActiveLease) -> None:
        with self._lock:
            if self._active is active:
                self._active = None
                active.agent = None
        reason = f": {active.end_reason}" if active.end_reason else ""
        _log.info("the lease of agent %r %s has ended%s", self._name, _holder(active.lease), reason)
        active.on_end(active.end_reason or "it ended")
        self._on_change()

    def _log_failure(self, active: ActiveLease) -> None:
        failure = active.agent.group_registry.failures.first() if active.agent is not None else None
        with self._lock:
            if failure is None or active.failure_logged:
                return
            active.failure_logged = True
        _log.warning("rank %d of job %r: %s", active.lease.rank, active.lease.job, failure)

    def _ended(self, reason: str) -> LeaseEndedError:
        return LeaseEndedError(f"the lease of agent {self._name!r} has ended: {reason}")

    def _not_leased(self) -> NotLeasedError:
        return NotLeasedError(
            f"agent {self._name!r} is in no job yet; attach an SDK process through the gateway, or POST /v1/lease with "
            "job, rank and world_size"
        )


def _holder(lease: Lease) -> str:
    return f"by {_rank(lease)} of job {lease.job!r} ({lease.holder})"


def _rank(lease: Lease) -> str:
    return "a rank" if lease.rank == UNASSIGNED else f"rank {lease.rank}"
