"""Agent of one rank: joins the job, and owns the connections, groups, store and heartbeats until it leaves.

Embedded in the training process, the SDK calls it directly, and the agent has an HTTP server of its own. A standalone
agent has the server first, and one of these for each lease. No thread serves the data plane: one serves HTTP, one sends
heartbeats.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

import rankmesh_agent.config.linux  # noqa: F401  # checks the platform
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics import process
from rankmesh_agent.diagnostics.dump import DumpWriter
from rankmesh_agent.diagnostics.snapshot import SnapshotServer, add_calls, snapshot, watch_waits
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.flight_recorder import FlightRecorder, after_error, error_text
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.groups import GroupRegistry
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.job_membership import MIN_SETUP_SECONDS, JobMembership, JoinTerms
from rankmesh_agent.liveness import Liveness
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import convert_emfile, raise_limit
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.progress.status import Status
from rankmesh_agent.shared_memory.process_vm import allow_reads
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.wire.credentials import Credentials, Grant
from rankmesh_agent.wire.errors import DistBackendError, DistError, ForbiddenJobError, RankFailedError
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.hello import Client, Service
from rankmesh_agent.wire.schemas import AgentHealth, AgentInfo, GroupInfo, GrowingWorld, Member
from rankmesh_agent.wire.snapshot import MAX_DUMPED, MAX_ENDED, ProcessView, RankDump, RankSnapshot, attached_rank
from rankmesh_agent.wire.stats import AgentStats
from rankmesh_agent.wire.version import __version__

_REPEATED = 100
"""Characters of a failure's text by which it is found in a reason."""


class Agent:
    """One rank of a job, from the join to the end.

    Args:
        http: the HTTP server; it outlives the agent. If left out, the agent starts one of its own.

    Attributes:
        member: this rank, as its peers know it.
        members: all ranks of the job; of most ranks of a large world, host and process alone.

    Raises:
        DistNetworkError: the join failed; the subclass and the message have the cause.
    """

    @convert_emfile("this rank cannot join the job")
    def __init__(
        self,
        settings: Settings,
        find_gateway: Callable[[], str | None],
        terms: JoinTerms,
        *,
        host: str,
        http: HttpServer | None = None,
    ) -> None:
        raise_limit()
        allow_reads()
        self.settings = settings
        self._find_gateway, self._host = find_gateway, host
        self._started = time.monotonic()
        self._leaving = False
        self._own_http: HttpServer | None = None
        self.recorder = FlightRecorder(settings.flight_recorder)
        with contextlib.ExitStack() as undo:
            if http is None:
                http = self._own_http = HttpServer.bind(settings, host)
                undo.callback(http.close)
            self._http = http
            job = self._job = JobMembership(settings, find_gateway, terms, host, http)
            undo.callback(job.close)
            undo.callback(job.heartbeats.stop)
            undo.push(job.leaving_after("it could not set up the world group"))
            self.member, self.members, self.engine = job.member, job.members, job.engine
            self.group_registry = GroupRegistry(job, settings, self.recorder)
            terms.check_store(job.store)
            self.store = JobStore(job.gateway.url, settings.job_token, job.store, self._exhausted_ranks)
            undo.callback(self.store.close)
            self._dumps = DumpWriter(settings.dump_dir, self._dump, self._awaited)
            limit = max(terms.deadline.remaining(), MIN_SETUP_SECONDS) if job.grown else terms.timeout
            try:
                self.world = self.group_registry.make_world(limit)
            except RankFailedError:
                job.raise_if_left()  # the gateway has the reason of a rank that did not connect to all others
                raise
            self.world.set_timeout(terms.timeout)
            self._liveness = Liveness(self.engine, self.store, self.world)
            self.engine.status_sources.append(self._store_statuses)
            self._serve_http()
            if settings.dump_dir:
                self.recorder.on_failure = self._dumps.on_failure
            undo.pop_all()
        self._heartbeats = job.heartbeats
        self._heartbeats.take_over(self._send_heartbeat, self._liveness)
        self.engine.on_peer_failure = self._heartbeats.wake

    def _serve_http(self) -> None:
        if self._own_http is not None:
            services = (
                SnapshotServer(lambda _: self.snapshot(), self._credentials),
                SnapshotServer(lambda _: self.snapshot(max_ended=MAX_DUMPED), self._credentials, Service.RECORDS),
                SnapshotServer(self._view, self._credentials, Service.PROCESS),
                SnapshotServer(lambda _: watch_waits(self.engine.waits), self._credentials, Service.WAITS),
            )
            self._own_http.start(self._app, {each.service: each for each in services}, on_demand=True)

    def _credentials(self) -> Credentials:
        return self.settings.job_credentials

    def _view(self, client: Client) -> ProcessView | None:
        """Return the process of another rank of this host, which does not answer, as the kernel shows it."""
        member = self.members.get(attached_rank(client.attachment))
        return process.view(member.pid, 1.0) if member is not None and member.host_id == self.member.host_id else None

    @property
    def failed_ranks(self) -> list[int]:
        """The other ranks of the job that the first failure names."""
        return self.group_registry.reason_to_end(self.member.rank, self.recorder.last_success())[1]

    def record_failure(self, group: Communicator, error: DistError) -> None:
        """Record an error of a group that ended this rank's process, although it may not have ended the group."""
        self.group_registry.failures.record_end(group.state, error)

    def failure_naming(self, ranks: Collection[int]) -> DistError | None:
        """Return the first failure of the groups that this rank has not left that names one of these ranks."""
        return self.group_registry.failures.naming(ranks)

    # Growth

    def num_waiting(self, seconds: float) -> int:
        """Return how many processes wait for the world of the job to grow; see GatewayClient."""
        return self._job.num_waiting(Deadline(seconds))

    def grow(self, world_size: int, seconds: float, check: Callable[[], None] = lambda: None) -> Agent:
        """Join the epoch of a larger world, with this one's keys and values; return this rank's agent there.

        All ranks of the world call it, and then close this agent, which until then goes on as before.

        Args:
            world_size: ranks in the larger world.
            seconds: time limit.

        Raises:
            JoinTimeoutError: ranks or waiting processes are missing; names them.
            RankFailedError: a rank has failed or left meanwhile.
            WorldSizeMismatchError: the ranks of the world call for different sizes.
        """

        def check_all() -> None:
            check()
            self.engine.progress()
            self.world.raise_if_member_lost("grow_group")

        world = GrowingWorld(self._job.epoch, self.world.size, f"{self.world.id:016x}")
        terms = JoinTerms(
            self.world.rank,
            world_size,
            self.world.timeout,
            Deadline(seconds),
            growth=world,
            check=check_all,
            check_store=self.store.check_same,
        )
        http = None if self._own_http is not None else self._http
        return Agent(self.settings, self._find_gateway, terms, host=self._host, http=http)

    def current(self, grant: Grant) -> Agent:
        """Return this agent: it is of one job, and of no lease that a client holds over HTTP."""
        grant.require(self.settings.job)
        if grant.lease:
            raise ForbiddenJobError("the credential given is that of a lease, and this rank's process hosts its agent")
        return self

    def watch_failures(self, notify: Callable[[DistBackendError], None]) -> None:
        """Have a function, which must not wait, called with the error of each rank of the world that fails."""
        self._liveness.callback = notify
        self._heartbeats.wake()

    # Groups

    def new_group(
        self, ranks: Sequence[int], timeout: float, global_ranks: Sequence[int] | None = None
    ) -> LocalCommunicator:
        """Make a group of these ranks, this one among them; only they need to call.

        Args:
            ranks: ranks of the members in the job.
            timeout: seconds for this call, and the default of the group's.
            global_ranks: see ``Communicator.global_ranks``; ``ranks`` if None.

        Raises:
            DistBackendError: a member did not come, or failed.
        """
        return self.group_registry.make(ranks, "", timeout, global_ranks=global_ranks)

    def drop_group(self, group: Communicator, how: Goodbye | None = None) -> None:
        """End a group at this rank; see LocalCommunicator.leave."""
        self.group_registry.drop(group, how)

    def set_world(self, group: LocalCommunicator) -> None:
        """Make a group the group of all ranks, to which the world has shrunk; its members have new global ranks."""
        group.set_global_ranks(tuple(range(group.size)))
        self.world = self._liveness.world = group
        self.store.failure = None  # it names ranks by their old numbers

    def use_mpi(self, group: Communicator, compare_calls: bool) -> None:
        """Run a group over MPI from now on: see mpi.group.use_mpi."""
        from rankmesh_agent.mpi.group import use_mpi  # only here: of all jobs, few run on MPI

        use_mpi(next(each for each in self.group_registry.all() if each is group), compare_calls)

    def groups(self) -> list[GroupInfo]:
        """Return the groups the rank is a member of."""
        return [group.info() for group in self.group_registry.all()]

    # State, for the HTTP endpoints

    def health(self) -> AgentHealth:
        """Return whether this rank can do its work."""
        groups = self.group_registry.all()
        reasons = [f"group {group.name!r}: {group.failure}" for group in groups if group.failure is not None]
        status: Literal["ok", "failing"] = "failing" if reasons else "ok"
        return AgentHealth(status, "rankmesh-agent", self.member.rank, self._job.world_size, __version__, reasons)

    def ready(self) -> bool:
        """Return whether this rank takes part in its job: it has joined, is not leaving, and its groups work."""
        return not self._leaving and self.health().status == "ok"

    def info(self) -> AgentInfo:
        """Return the agent's rank, job, addresses and version."""
        return AgentInfo(
            self._job.name,
            self._job.epoch,
            self._job.world_size,
            self.member,
            self._job.gateway.url,
            {str(rank): medium for rank, medium in sorted(self.engine.transports().items())},
            time.monotonic() - self._started,
            __version__,
        )

    def snapshot(self, *, attached: bool = False, max_ended: int = MAX_ENDED) -> RankSnapshot:
        """Return this rank as it is now, for diagnosis; ``attached``: another process makes the calls."""
        return snapshot(
            self._job.name,
            self._job.epoch,
            self.member.rank,
            attached=attached,
            recorder=self.recorder,
            awaited=self._awaited(),
            store_waits=self.store.pending_waits(),
            max_ended=max_ended,
        )

    def _dump(self, at: float, awaited: Collection[float]) -> RankDump:
        """Return this rank as it was at a time by the monotonic clock; see DumpWriter."""
        job, member = self._job, self.member
        found = RankDump(job.name, job.epoch, member.rank, attached=self._own_http is None)
        found.time = time.time() - time.monotonic() + at
        found.host, found.pid, found.world_size = member.host, member.pid, job.world_size
        add_calls(found, self.recorder, awaited, self.store.pending_waits(), at, MAX_DUMPED)
        return found

    def _awaited(self) -> set[float]:
        """Return the begin of each message for which a thread waits, by the monotonic clock."""
        groups = self.group_registry.all()
        return {message.record[3] for group in groups for message in group.messages.waiting.copy().values()}

    def stats(self) -> AgentStats:
        """Return the agent's counters."""
        lost = dict(self.engine.lost_peers)
        return AgentStats(
            self.recorder.operations(),
            self._job.beats.stats(),
            dict(Counter(medium for rank, medium in self.engine.transports().items() if rank not in lost)),
            sum(not loss.clean for loss in lost.values()),
        )

    # The end

    def close(
        self, reason: str = "", *, failed: bool = False, raised: bool = False, exit_text: str = "", place: str = ""
    ) -> None:
        """Leave the job: end the groups, report it to peers and gateway, stop the threads. Only once.

        Args:
            reason: the failure that ends this rank, for the gateway and for the errors of ranks that still wait for
                this one; empty if there is none.
            failed: whether the process whose rank this is has died: then the other ranks' groups with it end, too.
            raised: whether an exception has ended it: these groups end, too.
            exit_text: without a reason: how the process ends, for the errors of ranks that still wait for it.
            place: the line of the user's code that raised the exception, for the gateway.
        """
        if self._leaving:
            return
        with contextlib.ExitStack() as steps:  # all are taken, also if Ctrl-C ends one; the last is the first here
            if self._own_http is not None:
                steps.callback(self._own_http.close)
            steps.callback(self.store.close)
            steps.callback(self._job.close)
            steps.callback(self.group_registry.close)
            steps.callback(self._heartbeats.stop)
            steps.callback(self._dumps.close)
            with interrupts_deferred():  # before anything that waits for a thread
                self._leaving = True
                self._heartbeats.stop_soon()
                since = math.inf if failed else self.recorder.last_success()
                first, failed_ranks = self.group_registry.reason_to_end(self.member.rank, since)
                if first is None:
                    exit_text = after_error(exit_text, self.recorder.last_error())
                self.group_registry.leave()
                goodbye = _goodbye(reason or exit_text, failed, raised, first, failed_ranks)
                self._job.leave(f"{reason}, at {place}" if reason and place else reason, goodbye, failed_ranks)

    def end_in_child(self) -> None:
        """End the groups in a forked child, without a message to other processes."""
        self._leaving = True
        self.group_registry.end_in_child()
        self.engine.end_in_child()

    def _send_heartbeat(self) -> None:
        self._liveness.fail_silent_hosts()
        with self.engine.lock:
            self.engine.wait_graph.report_exhaustion(self.engine.connected())
        lost = self._liveness.failed_peers()
        self._liveness.pass_on()
        if self.engine.on_demand:
            self.engine.progress()  # what concerns all ranks is passed on also by those that compute
        usage = None if self._own_http is None else process.usage_of()
        restart = self._job.send_heartbeat(self.groups(), lost, usage=usage)
        if restart is not None:
            self.group_registry.abort_all(restart)
        unread = {each.rank for each in lost} - self.engine.lost_peers.keys()
        if unread and self.engine.on_demand:  # perhaps they left in order, which the gateway knows
            self._liveness.pass_on({rank: end for rank, end in self._job.ended().items() if rank in unread})

    def _store_statuses(self) -> list[Status]:
        """Return a wait for the job's store, as other ranks are answered. With the engine's lock held."""
        return [Status(0, -1, 0, "a call of the job's store")] if self.store.waits_under_way() else []

    def _exhausted_ranks(self, since: float) -> list[tuple[Member, str]]:
        """Return the ranks of the world that have had no free descriptor since a time, with their reports."""
        self.engine.progress()  # the heartbeat thread may wait for a gateway that is at its limit
        with self.engine.lock:
            exhausted = self.engine.wait_graph.exhausted(since)
        world = self.world.ranks
        return [
            (replace(self._job.members[rank], rank=world.index(rank)), text)
            for rank, text in exhausted.items()
            if rank in world
        ]

    def _app(self) -> object:
        from rankmesh_agent.http.app import create_app

        settings, names = self.settings, self._http.names
        return create_app(self, token=settings.credentials, names=names, max_tensor=settings.max_body)


def _goodbye(reason: str, failed: bool, raised: bool, first: DistError | None, failed_ranks: Sequence[int]) -> Goodbye:
    """Return the goodbye to the peers, after the first failure, if any, which names other ranks; see Agent.close."""
    if first is None:
        return Goodbye(reason, failed, raised)
    if not failed_ranks:
        return Goodbye(reason or f"after {error_text(first)}", failed, raised)
    if first.message[:_REPEATED] in reason:
        reason = ""  # the failure says the same
    return Goodbye(reason, failed, raised, first)
