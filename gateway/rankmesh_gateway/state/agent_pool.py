"""Pool of the standalone agents: their states, and the offers of free ones to clients."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rankmesh_agent.wire.errors import NoAgentsError, NoFreeAgentError
from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    OFFER_SECONDS,
    SUSPECT_SECONDS,
    UNASSIGNED,
    AgentEntry,
    AgentHeartbeat,
    AgentLeave,
    AgentState,
    Lease,
    LeaseOffer,
    LeaseRequest,
    Member,
)
from rankmesh_gateway.state.event_log import EventKind, EventLog
from rankmesh_gateway.state.rank import IN_TRANSIT_SECONDS
from rankmesh_gateway.state.validation import MAX_AGENTS, GatewayFullError, check_agent, check_lease, closing_error

FORGET_AGENT_SECONDS = 300.0
"""A standalone agent is forgotten after this long without a heartbeat."""
_MAX_LISTED = 20
"""Limit of the agents that an error names."""


@dataclass
class _Agent:
    """A standalone agent.

    Attributes:
        offered_to: the request of the client that it is reserved for, None if it is free for all.
        suspected_at: the clock when ranks reported its process lost; None without such a report, or after a later
            heartbeat.
    """

    beat: AgentHeartbeat
    last_seen: float
    offered_to: LeaseRequest | None = None
    offered_until: float = 0.0
    suspected_at: float | None = None
    logged_failed: bool = False

    def state(self, now: float) -> AgentState:
        silence = now - self.last_seen
        if silence >= FAILED_SECONDS:
            return "failed"
        if silence >= SUSPECT_SECONDS or self.suspected_at is not None:
            return "suspect"
        return "leased" if self.beat.leases else "free"

    def update(self, beat: AgentHeartbeat, now: float) -> None:
        """Record a heartbeat."""
        if self.suspected_at is not None and now - self.suspected_at >= IN_TRANSIT_SECONDS:
            self.suspected_at = None
        self.beat, self.last_seen = beat, now
        if beat.leases:
            self.offered_to = None

    def reserved_for(self, now: float) -> LeaseRequest | None:
        """Return the request of the client that it is reserved for."""
        return self.offered_to if now < self.offered_until else None

    def is_visible(self, job: str | None) -> bool:
        """Return whether it is leased for a job, or free; always for no job."""
        return job is None or not self.beat.leases or any(lease.job == job for lease in self.beat.leases)

    def describe(self, now: float, job: str | None) -> str:
        """Return its name, and why it is not free, without the particulars of other jobs than the given one."""
        state = self.state(now)
        if state in ("suspect", "failed"):
            return f"{self.beat.name} is {state} (no sign of life for {now - self.last_seen:.1f} s)"
        client = self.reserved_for(now)
        if not self.is_visible(job) or (client is not None and job not in (None, client.job)):
            return f"{self.beat.name} is taken by another job"
        if state == "leased":
            leases = " and ".join(
                f"{lease.holder} for {_describe_rank(lease.job, lease.rank)}" for lease in self.beat.leases
            )
            return f"{self.beat.name} is leased to {leases}"
        assert client is not None, "a free agent that is not reserved is offered"
        return f"{self.beat.name} is offered to {_describe_rank(client.job, client.rank)}"


class AgentPool:
    """Standalone agents of a gateway. Thread-safe, under the lock of its registry."""

    def __init__(self, clock: Callable[[], float], lock: threading.Lock, events: EventLog) -> None:
        self._clock = clock
        self._lock = lock
        self._events = events
        self._agents: dict[str, _Agent] = {}
        self._closed = False

    def heartbeat(self, beat: AgentHeartbeat) -> None:
        """Record a heartbeat; the first one registers the agent."""
        check_agent(beat)
        with self._lock:
            if self._closed:
                raise closing_error()
            now = self._clock()
            known = self._agents.get(beat.id)
            before = [] if known is None else known.beat.leases
            if known is None:
                self._make_room(beat, now)
                self._agents[beat.id] = _Agent(beat, now)
                self._log("agent-registered", "is registered", beat)
            else:
                known.update(beat, now)
            self._log_leases(beat, before)
            self.poll_timeouts(now)

    def leave(self, goodbye: AgentLeave) -> None:
        """Forget an agent. Does nothing if it is not known."""
        with self._lock:
            agent = self._agents.pop(goodbye.id, None)
            if agent is not None:
                self._log("agent-lost", "has ended", agent.beat)

    def entries(self, job: str | None = None) -> list[AgentEntry]:
        """Return the agents that are free or leased for a job, or all, in the natural order of their names."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            return [
                AgentEntry(agent.state(now), max(0.0, now - agent.last_seen), agent.beat)
                for agent in self._in_order()
                if agent.is_visible(job)
            ]

    def offer(self, request: LeaseRequest) -> LeaseOffer | None:
        """Offer a free agent, and reserve it for OFFER_SECONDS, or until it is leased; None if none is free.

        Rank r is offered the r-th agent in the natural order of names, or the next one that is free; agents with the
        client's host_id come before others. A rank that asks again is offered the agent that is reserved for it.
        """
        check_lease(request)
        with self._lock:
            if self._closed:
                raise closing_error()
            now = self._clock()
            self._forget(now)
            if not self._agents:
                raise NoAgentsError(
                    "no standalone agent is registered at this gateway; start one with 'rankmesh agent', or let the "
                    "process host its rank itself"
                )
            agent = self._choose(request, now)
            if agent is None:
                return None
            agent.offered_to, agent.offered_until = request, now + OFFER_SECONDS
            return LeaseOffer(agent.beat)

    def none_free_error(self, request: LeaseRequest, job: str | None = None) -> NoFreeAgentError:
        """Return the error of a request that has waited in vain: it names the agents that ``job`` may see."""
        with self._lock:
            now, agents = self._clock(), self._in_order()
            listed = [agent.describe(now, job) for agent in agents[:_MAX_LISTED]]
            if len(agents) > _MAX_LISTED:
                listed.append(f"and {len(agents) - _MAX_LISTED} more")
            return NoFreeAgentError(
                f"none of the {len(agents)} standalone agent(s) here is free for "
                f"{_describe_rank(request.job, request.rank)}: {'; '.join(listed)}. "
                "Ask again later, or start more agents"
            )

    # With the lock held

    def close(self) -> None:
        """Reject requests from now on."""
        self._closed = True

    def suspect(self, job: str, member: Member, now: float) -> None:
        """Record that a rank of a job is lost, and so its agent if that is a process of its own."""
        for agent in self._agents.values():
            leased = any(lease.job == job for lease in agent.beat.leases)
            if leased and (agent.beat.host_id, agent.beat.pid) == (member.host_id, member.pid):
                agent.suspected_at = now

    def excuse(self, seconds: float) -> None:
        """Take some seconds off the silence of all agents."""
        for agent in self._agents.values():
            agent.last_seen += seconds

    def poll_timeouts(self, now: float) -> None:
        """Log which agents have failed or have come back."""
        for agent in self._agents.values():
            failed = agent.state(now) == "failed"
            if failed and not agent.logged_failed:
                at = agent.last_seen + FAILED_SECONDS
                self._log("agent-lost", f"has failed: no sign of life for {FAILED_SECONDS:g} s", agent.beat, at)
            elif agent.logged_failed and not failed:
                self._log("agent-registered", "is back", agent.beat)
            agent.logged_failed = failed

    def _log_leases(self, beat: AgentHeartbeat, before: list[Lease]) -> None:
        known = {lease.id for lease in before}
        for lease in beat.leases:
            if lease.id not in known:
                detail = f"is leased to {lease.holder} for {_describe_rank(lease.job, lease.rank)}"
                self._log("agent-leased", detail, beat, lease=lease)
        kept = {lease.id for lease in beat.leases}
        for lease in before:
            if lease.id not in kept:
                detail = f"is free: {lease.holder} had it for {_describe_rank(lease.job, lease.rank)}"
                self._log("agent-freed", detail, beat, lease=lease)

    def _log(
        self, kind: EventKind, detail: str, beat: AgentHeartbeat, at: float | None = None, lease: Lease | None = None
    ) -> None:
        ranks = [lease.rank] if lease is not None and lease.rank != UNASSIGNED else []
        self._events.append(
            kind,
            f"agent {beat.name} ({beat.host}, pid {beat.pid}) {detail}",
            at=at,
            job=lease.job if lease is not None else "",
            ranks=ranks,
            agent=beat.name,
        )

    def _in_order(self) -> list[_Agent]:
        return sorted(self._agents.values(), key=lambda agent: (_natural_key(agent.beat.name), agent.beat.id))

    def _make_room(self, beat: AgentHeartbeat, now: float) -> None:
        """Forget the agents that a new one replaces, and raise GatewayFullError if there is no room after that."""
        self._forget(now)
        for agent_id, agent in list(self._agents.items()):
            # A port has one owner at a time, and the name of a silent agent has been given to another process.
            same_place = bool(set(beat.urls) & set(agent.beat.urls))
            if agent.beat.name == beat.name and (same_place or now - agent.last_seen >= SUSPECT_SECONDS):
                del self._agents[agent_id]
                if not agent.logged_failed:
                    self._log("agent-lost", "is gone: another process has come in its place", agent.beat)
        failed = (agent_id for agent_id, agent in self._agents.items() if agent.state(now) == "failed")
        if len(self._agents) >= MAX_AGENTS and (oldest := next(failed, None)) is not None:
            del self._agents[oldest]
        if len(self._agents) >= MAX_AGENTS:
            raise GatewayFullError(
                f"this gateway keeps {MAX_AGENTS} standalone agents and all are live; use another one"
            )

    def _forget(self, now: float) -> None:
        for agent_id, agent in list(self._agents.items()):
            if now - agent.last_seen > FORGET_AGENT_SECONDS:
                del self._agents[agent_id]

    def _choose(self, request: LeaseRequest, now: float) -> _Agent | None:
        agents = self._in_order()
        client = (request.job, request.rank) if request.rank != UNASSIGNED else None
        rated = []
        for index, agent in enumerate(agents):
            kept = agent.reserved_for(now)
            if agent.state(now) == "free" and (kept is None or (kept.job, kept.rank) == client):
                elsewhere = bool(request.host_id) and agent.beat.host_id != request.host_id
                rated.append((kept is None, elsewhere, (index - max(0, request.rank)) % len(agents), index))
        return agents[min(rated)[-1]] if rated else None


def _describe_rank(job: str, rank: int) -> str:
    return f"job {job!r}" if rank == UNASSIGNED else f"rank {rank} of job {job!r}"


def _natural_key(name: str) -> list[str | int]:
    """Return the key that sorts agent-2 before agent-10."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name))]
