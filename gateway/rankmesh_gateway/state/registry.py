"""The registry of jobs, ranks and groups: thread-safe, in memory, and without a web framework."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import (
    UNASSIGNED,
    EpochRequest,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    Leave,
    Member,
    MembersRequest,
    RankGroupInfo,
    RankInfo,
    ResourceUsage,
)
from rankmesh_gateway.schemas import GroupInFlight, JobInfo, RateSample, WaitingProcess
from rankmesh_gateway.state.agent_pool import AgentPool
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.event_log import EventLog
from rankmesh_gateway.state.event_writer import EventWriter
from rankmesh_gateway.state.groups import find_group, merged_calls, merged_groups
from rankmesh_gateway.state.history import History
from rankmesh_gateway.state.job import HeartbeatPace, Job
from rankmesh_gateway.state.launchers import LauncherRegistry
from rankmesh_gateway.state.rank import RankRecord
from rankmesh_gateway.state.saved import SavedEpoch, restore, save
from rankmesh_gateway.state.validation import MAX_JOBS, GatewayFullError, check_heartbeat, check_join, closing_error

FORGET_SECONDS = 3600.0
"""A job without a live rank is forgotten this long after its last sign of life."""

_POLL_SECONDS = 0.5
"""Minimum interval of the liveness scan."""
SCAN_SECONDS = 1.0
"""Interval at which a server polls the registry, see ``expect_scans``."""
_PAUSE_SECONDS = 2.5
"""A server that has not done anything for this long was itself suspended."""


class JobNotFoundError(DistNetworkError):
    """No world of that job is complete."""

    code = "job-not-found"
    status = 404


class Counts(NamedTuple):
    """Numbers of jobs with live ranks and of live ranks, joining ones included."""

    jobs: int
    ranks: int


class Registry:
    """Registry of jobs.

    Attributes:
        id: random name of this registry, which identifies the gateway process.
        deliver: completes the joins of a world; a server may do so little by little.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.id = secrets.token_hex(8)
        self.hosted = False
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._request_counts: Counter[str] = Counter()
        self.closed = self.refuses_worlds = False
        self.deliver: Callable[[Sequence[Future[JoinReply]], JoinReply], None] = complete_joins
        self._started = self._polled = self._scanned = clock()
        self._scans_expected = False
        self.events = EventLog(clock)
        self.agents = AgentPool(self._now, self._lock, self.events)
        self.launchers = LauncherRegistry(self._now, self._lock)
        self._writer = EventWriter(self.events)
        self._history = History(self._writer)
        self._pace = HeartbeatPace()

    def expect_scans(self, expected: bool) -> None:
        """Record whether a server calls ``poll_timeouts`` every SCAN_SECONDS.

        If such a call is late, the process was suspended, or a thread held the interpreter: heartbeats of that time
        have not been read yet, so it does not count as silence of the ranks and agents.
        """
        with self._lock:
            self._scans_expected, self._scanned = expected, self._clock()

    def join(self, request: JoinRequest) -> Future[JoinReply]:
        """Add a rank to its job's forming epoch. Repeating it with the same instance changes nothing.

        Returns:
            A future with the complete reply, the same for all ranks, done as soon as the last one joins. Cancel it to
            stop waiting: the rank keeps its place, and may come back, until it has been silent for
            JOIN_SILENCE_SECONDS. It is cancelled when the rank leaves and when the registry is closed.

        Raises:
            InvalidRequestError: a value of the request is invalid.
            RankTakenError: another live process holds the rank, or others hold all ranks.
            WorldSizeMismatchError: the forming world has another size.
            JobEndedError: the job of a process that awaits its growth has no rank left.
            GatewayFullError: the job is new and there are MAX_JOBS with live ranks.
            GatewayClosingError: the registry is closed, and the rank's world was not complete before.
        """
        check_join(request)
        future: Future[JoinReply] = Future()
        with self._lock:
            self._check_open(request)
            job = self._job(request.job)
            self._request_counts["joins"] += 1
            now = self._now()
            self._poll_if_due(now)
            job.poll_timeouts(now)
            ended = []
            if request.attempt > job.attempt:
                ended = job.restart(request.attempt, now, self.launchers.reason(job.name, request.attempt))
            epoch = job.join(request, now)
            self._jobs[job.name] = job
            record = epoch.find(UNASSIGNED, request.member.instance)
            assert record is not None, "the process has joined the epoch"
            record.waiters.add(future)
            ready = epoch.waiters() if epoch.complete else []
            reply = epoch.reply() if ready else None
        if ended:
            _cancel(ended)
        if reply is not None:
            self.deliver(ready, reply)
        future.add_done_callback(partial(self._drop_waiter, record))
        return future

    def restart(self, job: str, attempt: int) -> None:
        """End the epochs of a job's attempts before this number: its launcher starts all ranks again."""
        with self._lock:
            found = self._jobs[job] = self._job(job)
            ended = found.restart(attempt, self._now(), self.launchers.reason(job, attempt))
        _cancel(ended)

    def join_status(self, request: JoinRequest) -> JoinReply:
        """Return the reply to a join without joining: the members, and the ranks that are missing."""
        with self._lock:
            self._check_open(request)
            job = self._jobs.get(request.job) or Job(request.job, self._writer, self._pace)
            return job.awaited_epoch(request).reply()

    def withdraw_join(self, request: JoinRequest) -> None:
        """Free the place of a joiner whose connection broke, unless it waits on another one.

        Its process has probably died, so the world must not become complete with it, and its successor need not wait
        for the place. Does nothing if the world is complete.
        """
        with self._lock:
            job = self._jobs.get(request.job)
            if job is not None:
                job.withdraw(request.member.rank, request.member.instance, if_idle=True)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Record a heartbeat; a registry that does not know the rank, its epoch or its job adds them.

        Returns the failed ranks of the epoch, and the reason to restart if the job's nodes have changed. Raises as
        ``join``.
        """
        check_heartbeat(beat)
        with self._lock:
            if self.closed:
                raise closing_error()
            now = self._now()
            self._request_counts["heartbeats"] += 1
            job = self._job(beat.job)
            interval = self._pace.interval
            epoch, lost, groups = job.heartbeat(beat, now)
            self._jobs[job.name] = job
            for record in lost:
                self.agents.suspect(beat.job, record.member, now)
            self._poll_if_due(now)
            change = self.launchers.change_after(beat.job, job.attempt if epoch is not None else job.attempt - 1, now)
            if change is not None:
                return HeartbeatReply([], restart=change.reason, lost_ranks=change.lost_ranks)
            failed, version = epoch.failed(beat.failed_version) if epoch is not None else ([], 0)
            known = version if beat.failed_version >= 0 else 0
            return HeartbeatReply(failed, known, interval, groups.resend, groups.unknown, groups.dropped)

    def leave(self, goodbye: Leave) -> None:
        """Record that a rank leaves; with a reason, that it has failed. A joiner's place is free at once."""
        with self._lock:
            self._request_counts["leaves"] += 1
            job = self._jobs.get(goodbye.job)
            if job is None:
                return
            job.leave(goodbye, self._now())
            ended = job.withdraw(goodbye.rank, goodbye.instance)
            if job.has_ended():  # the waiting processes' next requests are refused
                ended += job.growth.wait_list.waiters()
        _cancel(ended)

    def process_exited(self, job: str, rank: int, pid: int, host: str, reason: str) -> None:
        """Record that a rank's process exited without success, from the launcher that observed it."""
        with self._lock:
            found = self._jobs.get(job)
            if found is not None:
                found.process_exited(rank, pid, host, reason, self._now())

    def poll_timeouts(self) -> None:
        """Record and log which ranks and agents have fallen silent, and record the rates."""
        with self._lock:
            now = self._polled_now()
            self._history.observe(self._epochs(None), now)

    def saved(self, names: Collection[str] | None = None) -> tuple[set[str], dict[str, list[SavedEpoch]]]:
        """Return the names of all jobs, and the complete epochs of some, or all, as they are saved, by job."""
        with self._lock:
            offset = time.time() - self._clock()
            chosen = [job for job in self._jobs.values() if names is None or job.name in names]
            epochs = {
                job.name: [save(epoch, lambda at: at + offset) for epoch in job.epochs.values()] for job in chosen
            }
            return {*self._jobs}, epochs

    def restore(self, epochs: Iterable[SavedEpoch]) -> None:
        """Add the epochs that an earlier registry saved. Their ranks have to report again in time."""
        with self._lock:
            now = self._clock()
            offset = now - time.time()
            for each in epochs:
                job = self._jobs.setdefault(each.job, Job(each.job, self._writer, self._pace))
                job.epochs[each.number] = restore(each, lambda at: at + offset, now)

    def refuse_worlds(self) -> None:
        """Admit ranks to complete worlds and their growth alone: new worlds meet at another gateway.

        The id changes, so that an address published with the old one is not this gateway's any more.
        """
        with self._lock:
            self.refuses_worlds, self.id = True, secrets.token_hex(8)
            waiters: list[Future[Any]] = []
            for job in self._jobs.values():
                if job.forming is not None:
                    waiters += job.forming.waiters()
                    job.forming = None
        _cancel(waiters)

    def release_ranks(self) -> None:
        """Admit other processes as the ranks of new worlds, whether those of the worlds so far are live or not."""
        with self._lock:
            for job in self._jobs.values():
                job.holds_ranks = False

    def close(self) -> None:
        """End all waits and reject joins and heartbeats, so that a server can shut down. Reads still work."""
        with self._lock:
            self.closed = True
            waiters: list[Future[Any]] = [future for job in self._jobs.values() for future in job.waiters()]
            self.agents.close()
        _cancel(waiters)
        self.events.close()

    def stores(self) -> dict[str, str]:
        """Return the jobs whose launchers or ranks use a store, by its id: the oldest one of a job comes first."""
        with self._lock:
            of_ranks = {epoch.store: epoch.job for epoch in self._epochs(None) if epoch.store and epoch.live_ranks()}
            return self.launchers.stores() | of_ranks

    def has_unknown_store(self, job: str) -> bool:
        """Return whether a job's ranks use a store whose id is not known, as this registry is newer than the job."""
        with self._lock:
            found = self._jobs.get(job)
            return found is not None and any(not each.store and each.live_ranks() for each in found.epochs.values())

    def ranks(self, job: str | None = None) -> list[RankInfo]:
        """Return the ranks of one job or of all, by job, epoch and rank."""
        with self._lock:
            now = self._polled_now()
            return [info for epoch in self._epochs(job) for info in epoch.infos(now)]

    def ended_ranks(self, request: EpochRequest) -> list[RankInfo]:
        """Return the ranks of an epoch that have left or failed, by rank."""
        with self._lock:
            now, epoch = self._polled_now(), self._epoch(request)
            return [] if epoch is None else [each.info(request.job, request.epoch, now) for each in epoch.ended()]

    def addresses(self, request: MembersRequest) -> list[Member]:
        """Return those of the wanted members of an epoch that are known."""
        with self._lock:
            epoch = self._epoch(request)
            return [] if epoch is None else epoch.members(request.ranks)

    def attempt_ranks(self, job: str, attempt: int) -> list[RankInfo]:
        """Return the ranks of a job's attempt; of an earlier one as they were when it ended."""
        with self._lock:
            found, now = self._jobs.get(job), self._polled_now()
            if found is None:
                return []
            return [info for epoch in found for info in epoch.infos(now)] if found.attempt == attempt else found.before

    def usage(self, job: str) -> dict[int, ResourceUsage]:
        """Return what the ranks of a job's latest complete world use of their hosts, as far as it is known."""
        with self._lock:
            epoch = self._jobs[job].latest() if job in self._jobs else None
            return {} if epoch is None else epoch.scores.usage()

    def waiting(self, job: str | None = None) -> list[WaitingProcess]:
        """Return the processes that wait for worlds to grow, by job, in the order in which they came."""
        with self._lock:
            now = self._now()
            names = sorted(self._jobs if job is None else {job} & self._jobs.keys())
            return [WaitingProcess(name, each) for name in names for each in self._jobs[name].waiting(now)]

    def groups(self, job: str | None = None) -> list[RankGroupInfo]:
        """Return the groups of one job or of all, by job, epoch and id, as their members last reported them."""
        with self._lock:
            now = self._polled_now()
            return [info for epoch in self._epochs(job) for info in merged_groups(epoch, now)]

    def jobs(self, job: str | None = None) -> list[JobInfo]:
        """Return a summary of each epoch of one job or of all, by job and number."""
        with self._lock:
            now, time_now = self._polled_now(), time.time()
            return [epoch.summary(now, time_now) for epoch in self._epochs(job)]

    def rate_history(self, job: str | None = None) -> list[RateSample]:
        """Return the total rates of the last HISTORY_SECONDS, the oldest first."""
        with self._lock:
            return self._history.samples(self._now(), job)

    def in_flight(self, job: str | None = None) -> list[GroupInFlight]:
        """Return the calls in flight by job, epoch and group, the earliest first, as the members last reported them."""
        with self._lock:
            now = self._polled_now()
            return [each for epoch in self._epochs(job) for each in merged_calls(epoch, now)]

    def find_group(self, name: str, job: str | None = None) -> tuple[RankGroupInfo, dict[int, RankInfo]]:
        """Return a group of one job or of all, and the ranks of its epoch; see ``groups.find_group``."""
        with self._lock:
            now = self._polled_now()
            epoch, info = find_group(self._epochs(job), name, now)
            return info, {rank: record.info(epoch.job, epoch.number, now) for rank, record in epoch.records.items()}

    def members(self, job: str) -> dict[int, RankInfo]:
        """Return the ranks of a job's latest complete world."""
        with self._lock:
            now = self._polled_now()
            epoch = self._jobs[job].latest() if job in self._jobs else None
            if epoch is None:
                raise JobNotFoundError(f"no world of a job {job!r} has come together here; GET /v1/jobs lists the jobs")
            return {rank: record.info(job, epoch.number, now) for rank, record in sorted(epoch.records.items())}

    @property
    def uptime(self) -> float:
        """Seconds since the registry was created."""
        return self._clock() - self._started

    def counts(self) -> Counts:
        """Return the number of live jobs and ranks."""
        with self._lock:
            self._polled_now()
            present = [job.live_ranks() for job in self._jobs.values()]
            return Counts(sum(ranks > 0 for ranks in present), sum(present))

    def _now(self) -> float:
        """Return the clock; the time that this process was suspended does not count as silence. With the lock held."""
        now = self._clock()
        pause, self._scanned = now - self._scanned, now
        if self._scans_expected and pause >= _PAUSE_SECONDS:
            self.agents.excuse(pause)
            self.launchers.excuse(pause)
            for job in self._jobs.values():
                job.excuse(pause)
        return now

    def _polled_now(self) -> float:
        """Return the clock, after the state changes that it has caused. With the lock held."""
        now = self._now()
        self._poll_timeouts(now)
        return now

    def _poll_timeouts(self, now: float) -> None:
        """Record and log the state changes that the clock alone has caused. With the lock held."""
        self._polled = now
        for job in self._jobs.values():
            job.poll_timeouts(now)
        self.agents.poll_timeouts(now)
        self._pace.set_ranks(sum(map(Job.live_ranks, self._jobs.values())))

    def _poll_if_due(self, now: float) -> None:
        """Poll, but not at every request."""
        if now - self._polled >= _POLL_SECONDS:
            self._poll_timeouts(now)

    def request_counts(self) -> Counter[str]:
        """Return the number of ``joins``, ``heartbeats`` and ``leaves`` so far."""
        with self._lock:
            return self._request_counts.copy()

    def _check_open(self, request: JoinRequest) -> None:
        """Raise GatewayClosingError if a new world has to meet elsewhere, and the join's was not complete before."""
        if self.closed or (self.refuses_worlds and not request.awaits_growth and request.growth is None):
            job = self._jobs.get(request.job)
            if job is None or job.epoch_of(request.member) is None:
                raise closing_error()

    def _epochs(self, name: str | None) -> list[Epoch]:
        return [epoch for each in sorted(self._jobs) if name in (None, each) for epoch in self._jobs[each]]

    def _epoch(self, request: EpochRequest | MembersRequest) -> Epoch | None:
        job = self._jobs.get(request.job)
        return None if job is None else job.epochs.get(request.epoch)

    def _job(self, name: str) -> Job:
        """Return the job of that name, or a new one that the caller adds once a rank is in it."""
        if name not in self._jobs:
            self._make_room()
        return self._jobs.get(name) or Job(name, self._writer, self._pace)

    def _make_room(self) -> None:
        now = self._now()
        for job in self._jobs.values():
            job.drop_silent_joiners(now)
        gone = {name: job.last_seen() for name, job in self._jobs.items() if not job.live_ranks()}
        for name in sorted(gone, key=gone.__getitem__):
            if now - gone[name] <= FORGET_SECONDS and len(self._jobs) < MAX_JOBS:
                break
            del self._jobs[name]
        if len(self._jobs) >= MAX_JOBS:
            raise GatewayFullError(
                f"this gateway keeps {MAX_JOBS} jobs and all have live ranks; use another gateway, or end some of them"
            )

    def _drop_waiter(self, record: RankRecord, future: Future[JoinReply]) -> None:
        with self._lock:
            record.waiters.discard(future)


def complete_joins(joins: Iterable[Future[JoinReply]], reply: JoinReply) -> None:
    """Complete the joins of a world that are not cancelled."""
    for future in joins:
        if future.set_running_or_notify_cancel():
            future.set_result(reply)


def _cancel(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
