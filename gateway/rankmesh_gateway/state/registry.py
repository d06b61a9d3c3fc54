"""The registry of jobs, ranks and groups: thread-safe, in memory, and without a web framework."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import (
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    Leave,
    RankGroupInfo,
    RankInfo,
)
from rankmesh_gateway.schemas import GroupInFlight, JobInfo
from rankmesh_gateway.state.agent_pool import AgentPool
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.event_log import EventLog
from rankmesh_gateway.state.event_writer import EventWriter
from rankmesh_gateway.state.groups import merged_calls, merged_groups
from rankmesh_gateway.state.job import Job
from rankmesh_gateway.state.validation import MAX_JOBS, GatewayFullError, check_heartbeat, check_join, closing_error

FORGET_SECONDS = 3600.0
"""A job without a live rank is forgotten this long after its last sign of life."""


_POLL_SECONDS = 0.5
"""How often it is looked who has fallen silent, at most."""


class GroupNotFoundError(DistNetworkError):
    """No group, or more than one, goes by that id or name."""

    code = "group-not-found"
    status = 404


class JobNotFoundError(DistNetworkError):
    """No world of that job has come together."""

    code = "job-not-found"
    status = 404


class Counts(NamedTuple):
    """How many jobs have live ranks, and how many live ranks there are, joining ones included."""

    jobs: int
    ranks: int


class Registry:
    """Who is in which job, and how they are.

    Args:
        clock: seconds that only go up; tests give their own.

    Attributes:
        id: random name of this registry, to tell one gateway process from the next.
        agents: the standalone agents.
        events: what happened.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.id = secrets.token_hex(8)
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._request_counts: Counter[str] = Counter()
        self._closed = False
        self._started = self._polled = clock()
        self.events = EventLog(clock)
        self.agents = AgentPool(clock, self._lock, self.events)
        self._writer = EventWriter(self.events)

    def join(self, request: JoinRequest) -> Future[JoinReply]:
        """Enter a rank into its job's forming world. Repeating it with the same instance changes nothing.

        Returns:
            A future with the complete reply, the same for all ranks, done as soon as the last one is there. Cancel it
            to stop waiting: the rank keeps its place, and may come back, until it has been silent for
            JOIN_SILENCE_SECONDS. It is cancelled when the rank leaves and when the registry is closed.

        Raises:
            InvalidRequestError: the request makes no sense.
            RankTakenError: another process that runs holds the rank, or others hold all ranks.
            WorldSizeMismatchError: the forming world has another size.
            GatewayFullError: the job is new and there are MAX_JOBS with live ranks.
            GatewayClosingError: the registry is closed, and the rank's world was not complete before.
        """
        check_join(request)
        future: Future[JoinReply] = Future()
        with self._lock:
            self._check_open(request)
            job = self._job(request.job)
            self._request_counts["joins"] += 1
            world = job.join(request, self._clock())
            self._jobs[job.name] = job
            world.waiters[future] = request.member.instance
            reply = world.reply()
            ready = _take_all(world.waiters) if reply.complete else []
        for waiting in ready:
            _resolve(waiting, reply)
        future.add_done_callback(lambda ended: self._drop_waiter(world, ended))
        return future

    def join_status(self, request: JoinRequest) -> JoinReply:
        """Tell where a join stands, without joining: who is there, and which ranks are missing.

        Raises:
            GatewayClosingError: the registry is closed, and the rank's world was not complete before.
        """
        with self._lock:
            self._check_open(request)
            job = self._jobs.get(request.job) or Job(request.job, self._writer)
            return job.awaited_epoch(request).reply()

    def withdraw_join(self, request: JoinRequest) -> None:
        """Free the place of a joiner whose connection broke, unless it waits through another one.

        Its process has probably died, so the world must not become complete with it, and its successor need not wait
        for the place. Does nothing when the world is already complete.
        """
        with self._lock:
            job = self._jobs.get(request.job)
            if job is None or job.forming is None or job.forming.is_waiting(request.member.instance):
                return
            job.withdraw(request.member.rank, request.member.instance)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Take in a rank's sign of life; a registry that does not know the rank, its epoch or its job learns them.

        Returns:
            The ranks of the same job and epoch that have failed.

        Raises:
            InvalidRequestError: the heartbeat makes no sense.
            RankTakenError: another process that runs holds this rank of the epoch.
            WorldSizeMismatchError: the epoch's other ranks have another world size.
            GatewayFullError: the job is new and there are MAX_JOBS with live ranks.
            GatewayClosingError: the registry is closed.
        """
        check_heartbeat(beat)
        with self._lock:
            if self._closed:
                raise closing_error()
            now = self._clock()
            self._request_counts["heartbeats"] += 1
            job = self._job(beat.job)
            world, lost = job.heartbeat(beat, now)
            self._jobs[job.name] = job
            for record in lost:
                self.agents.suspect(record.member, now)
            self._poll_timeouts(now)
            return HeartbeatReply(world.failed(now) if world is not None else [])

    def leave(self, goodbye: Leave) -> None:
        """Take in a goodbye; with a reason the rank has failed. A joiner's place is free at once.

        Goodbyes of ranks that are not known are ignored: there is nothing to end.
        """
        with self._lock:
            self._request_counts["leaves"] += 1
            job = self._jobs.get(goodbye.job)
            if job is None:
                return
            job.leave(goodbye, self._clock())
            world = job.withdraw(goodbye.rank, goodbye.instance)
            waits = [] if world is None else [wait for wait, who in world.waiters.items() if who == goodbye.instance]
        _cancel(waits)

    def process_exited(self, job: str, rank: int, pid: int, host: str, reason: str) -> None:
        """Take in that a rank's process ended without success, from the launcher that watched it.

        Args:
            job: its job.
            rank: the rank it was started as.
            pid: its id.
            host: the host it ran on.
            reason: how it ended, ``signal SIGKILL (9)``.
        """
        with self._lock:
            found = self._jobs.get(job)
            if found is not None:
                found.process_exited(rank, pid, host, reason, self._clock())

    def poll_timeouts(self) -> None:
        """Have the event log told who has fallen silent."""
        with self._lock:
            self._poll_timeouts(self._clock())

    def close(self) -> None:
        """End all waits and take nobody in any more, so that a server can shut down. Reading goes on to work."""
        with self._lock:
            self._closed = True
            waits = [wait for job in self._jobs.values() for world in job for wait in world.waiters]
            askers = self.agents.close()
        _cancel(waits)
        _cancel(askers)
        self.events.close()

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    def ranks(self, job: str | None = None) -> list[RankInfo]:
        """The ranks of one job or of all, by job, epoch and rank."""
        with self._lock:
            now = self._clock()
            self._poll_timeouts(now)
            return [info for world in self._epochs(job) for info in world.infos(now)]

    def groups(self, job: str | None = None) -> list[RankGroupInfo]:
        """The groups of one job or of all, by job, epoch and id, as their members last reported them."""
        with self._lock:
            now = self._clock()
            return [info for world in self._epochs(job) for info in merged_groups(world, now)]

    def jobs(self) -> list[JobInfo]:
        """The worlds of all jobs, by job and epoch."""
        with self._lock:
            now, time_now = self._clock(), time.time()
            return [world.summary(now, time_now) for world in self._epochs(None)]

    def in_flight(self, job: str | None = None) -> list[GroupInFlight]:
        """The calls under way, by job, epoch and group, the earliest first, as the members last reported them."""
        with self._lock:
            now = self._clock()
            return [each for world in self._epochs(job) for each in merged_calls(world, now)]

    def find_group(self, name: str, job: str | None = None) -> tuple[RankGroupInfo, dict[int, RankInfo]]:
        """A group, and its members that are known here, by rank.

        Args:
            name: the group's id, or its name where no other group that is in use has it.
            job: look for it in this job only.

        Raises:
            GroupNotFoundError: no group has that id or name, or several have that name.
        """
        with self._lock:
            now = self._clock()
            worlds = self._epochs(job)
            found = [
                (world, info) for world in worlds for info in merged_groups(world, now) if name in (info.id, info.name)
            ]
            if len(found) > 1:  # of a job's worlds, the one that is there counts
                found = [(world, info) for world, info in found if world.live_ranks(now)]
            if len(found) != 1:
                raise _group_not_found(name, [info for _, info in found])
            world, info = found[0]
            return info, {rank: world.records[rank].info(world.job, world.number, now) for rank in world.records}

    def members(self, job: str) -> dict[int, RankInfo]:
        """The ranks of a job's latest world that has come together, by rank.

        Raises:
            JobNotFoundError: there is none.
        """
        with self._lock:
            now = self._clock()
            known = self._jobs.get(job)
            world = known.latest() if known is not None else None
            if world is None:
                there = ", ".join(map(repr, sorted(self._jobs)[:20])) or "none"
                raise JobNotFoundError(f"no world of a job {job!r} has come together here; the jobs here are: {there}")
            return {rank: record.info(job, world.number, now) for rank, record in sorted(world.records.items())}

    @property
    def uptime(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._started

    def counts(self) -> Counts:
        """How much is going on."""
        with self._lock:
            now = self._clock()
            present = [job.live_ranks(now) for job in self._jobs.values()]
            return Counts(sum(ranks > 0 for ranks in present), sum(present))

    def _poll_timeouts(self, now: float) -> None:
        """Tell the event log what the clock alone has changed. With the lock held; does nothing soon after the last."""
        if now - self._polled >= _POLL_SECONDS:
            self._polled = now
            for job in self._jobs.values():
                job.poll_timeouts(now)
            self.agents.poll_timeouts(now)

    def request_counts(self) -> Counter[str]:
        """How many ``joins``, ``heartbeats`` and ``leaves`` there have been."""
        with self._lock:
            return self._request_counts.copy()

    def _check_open(self, request: JoinRequest) -> None:
        """Raise GatewayClosingError for a join that can no longer come to an end here."""
        if self._closed:
            job = self._jobs.get(request.job)
            if job is None or job.epoch_of(request.member) is None:
                raise closing_error()

    def _epochs(self, name: str | None) -> list[Epoch]:
        names = sorted(self._jobs) if name is None else [name]
        return [world for each in names if each in self._jobs for world in self._jobs[each]]

    def _job(self, name: str) -> Job:
        """The job of that name, or a new one that the caller keeps once a rank is in it."""
        if name not in self._jobs:
            self._make_room()
        return self._jobs.get(name) or Job(name, self._writer)

    def _make_room(self) -> None:
        now = self._clock()
        for job in self._jobs.values():
            job.drop_silent_joiners(now)
        gone = {name: job.last_seen() for name, job in self._jobs.items() if not job.live_ranks(now)}
        for name in sorted(gone, key=gone.__getitem__):
            if now - gone[name] <= FORGET_SECONDS and len(self._jobs) < MAX_JOBS:
                break
            del self._jobs[name]
        if len(self._jobs) >= MAX_JOBS:
            raise GatewayFullError(
                f"this gateway keeps {MAX_JOBS} jobs and all have live ranks; use another gateway, or end some of them"
            )

    def _drop_waiter(self, world: Epoch, future: Future[JoinReply]) -> None:
        with self._lock:
            world.waiters.pop(future, None)


def _group_not_found(name: str, found: list[RankGroupInfo]) -> GroupNotFoundError:
    if not found:
        return GroupNotFoundError(f"no rank reports a group {name!r}; GET /v1/groups lists those there are", group=name)
    where = ", ".join(f"{info.id} in job {info.job!r}" for info in found[:20])
    return GroupNotFoundError(f"{len(found)} groups are called {name!r}: {where}; say which by its id", group=name)


def _take_all(waits: dict[Future[JoinReply], str]) -> list[Future[JoinReply]]:
    taken = list(waits)
    waits.clear()
    return taken


def _resolve(future: Future[JoinReply], reply: JoinReply) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(reply)


def _cancel(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
