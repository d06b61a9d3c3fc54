"""Registry of the groups that a rank is a member of, made by the job's calls, or over HTTP, and of their failures.

The first failure explains why the rank ends.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from rankmesh_agent.backends.segment_setup import Agreement, SegmentOptions
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.flight_recorder import FlightRecorder, after_error, error_text
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.job_membership import JobMembership
from rankmesh_agent.net.descriptors import convert_emfile
from rankmesh_agent.net.fork import reset_lock
from rankmesh_agent.shared_memory.mapping import unsupported
from rankmesh_agent.shared_memory.orphans import remove_orphans
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistError, from_code
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import GroupRequest


class FailureLog:
    """First failures of the groups that a rank has not left. For several threads."""

    def __init__(self) -> None:
        self._groups: dict[GroupState, None] = {}
        self._replaced: list[GroupState] = []
        self._end: tuple[GroupState, DistError] | None = None

    def add_group(self, state: GroupState) -> None:
        """Have the failure of a group count from now on."""
        self._groups[state] = None

    def record_end(self, state: GroupState, error: DistError) -> None:
        """Record an error of a group that ends the rank's process, whatever failed before."""
        self._end = state, error

    def remove_group(self, state: GroupState) -> None:
        """Forget a group that the rank leaves: the rank goes on without it."""
        self._groups.pop(state, None)

    def replace_group(self, state: GroupState) -> None:
        """Forget a group that the rank leaves, once another one has been made."""
        self._replaced.append(state)

    def on_group_made(self) -> None:
        """Forget the replaced groups: the rank goes on with the group that has been made."""
        while self._replaced:
            self.remove_group(self._replaced.pop())

    def first(self) -> DistError | None:
        """Return the first failure, None while all groups work."""
        return next((error for _, error, _ in self._failures()), None)

    def naming(self, ranks: Collection[int]) -> DistError | None:
        """Return the first failure that names one of these ranks, None if there is none."""
        return next((error for _, error, _ in self._failures() if set(error.ranks).intersection(ranks)), None)

    def reason_to_end(self, rank: int, since: float) -> tuple[DistError | None, list[int]]:
        """Return the failure because of which the rank's process ends, and the ranks of the job that it blames.

        A mismatch names the ranks that made another call than most, but which of the calls is wrong is not known.

        Args:
            rank: this rank, which is left out.
            since: the rank has gone on after failures before that time.
        """
        if self._end is not None:
            state, error = self._end
        else:
            found = [(state, error) for at, error, state in self._failures() if at >= since]
            if not found:
                return None, []
            state, error = found[0]
        blamed = [] if isinstance(error, CollectiveMismatchError) else state.job_ranks(error)
        return error, [each for each in blamed if each != rank]

    def _failures(self) -> list[tuple[float, DistError, GroupState]]:
        """Return the failures, the first one first, each with its time and its group."""
        groups = [(state.failed_at, state.failure, state) for state in self._groups.copy()]
        found = [(at, error, state) for at, error, state in groups if at is not None and error is not None]
        return sorted(found, key=itemgetter(0))


_log = logging.getLogger("rankmesh")
_MAX_HTTP_COUNTS = 1024
_warned = False


def _warn_once(message: str, *arguments: object) -> None:
    """Log why groups share no memory, once in this process: the next group finds the same."""
    global _warned
    if not _warned:
        _warned = True
        _log.warning(message, *arguments)


class GroupExistsError(DistError, code="group-exists", status=409):
    """Another group has the name."""


class GroupInUseError(DistError, code="group-in-use", status=409):
    """The group was not made over HTTP: its job ends it."""


class GroupRegistry:
    """Groups of one rank, and their ``failures``. For several threads."""

    def __init__(self, job: JobMembership, settings: Settings, recorder: FlightRecorder) -> None:
        self.failures = FailureLog()
        self._job = job
        self._recorder = recorder
        local_ranks = sum(member.host_id == job.member.host_id for member in job.members.values())
        self._segment_options = SegmentOptions(
            allowed=settings.transport != "tcp" and not unsupported(),
            directory=settings.shm_dir,
            job=settings.job,
            slot_bytes=Segment.slot_bytes_on_host(settings.slot_bytes, local_ranks),
            oversubscribed=job.oversubscribed,
            strict=settings.transport == "shm",
            warn=_warn_once,
        )
        if self._segment_options.allowed:
            remove_orphans(settings.shm_dir)
        self._lock = threading.Lock()
        self._groups: dict[int, LocalCommunicator] = {}
        self._pending: list[LocalCommunicator] = []
        self._counts: dict[tuple[tuple[int, ...], str], int] = {}
        self._http_counts: dict[tuple[tuple[int, ...], str], int] = {}
        self._http_keys: dict[int, str] = {}
        self._pending_names: set[str] = set()

    def all(self) -> list[LocalCommunicator]:
        """Return the groups, in the order in which they were made."""
        with self._lock:
            return list(self._groups.values())

    def end_in_child(self) -> None:
        """End the groups in a forked child, without a message to their members."""
        reset_lock(self._lock)
        for group in [*self._groups.values(), *self._pending]:
            group.end_in_child()

    def find(self, name: str) -> LocalCommunicator | None:
        """Return the group of an id (16 hexadecimal digits) or name, None if the rank is in none."""
        return next((group for group in self.all() if name in (group.name, f"{group.id:016x}")), None)

    @convert_emfile("this rank cannot make a group")
    def make(
        self,
        ranks: Sequence[int],
        name: str,
        timeout: float,
        http_key: str = "",
        begun: Callable[[LocalCommunicator], None] = lambda group: None,
        global_ranks: Sequence[int] | None = None,
    ) -> LocalCommunicator:
        """Make a group of ranks of the job; see Agent.new_group.

        Args:
            name: name for people; one of the id if empty.
            http_key: identifies a group that is made over HTTP, equal at all members.
        """
        members = tuple(ranks)
        count = self._count_attempt(members, http_key)
        job = self._job
        text = f"{job.name}/{job.epoch}/{members}/{count}{f'/{http_key}' if http_key else ''}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        name = name or f"group-{number:016x}"[:14]
        state = LocalGroupState(job.engine, number, name, members, job.members, self._recorder)
        group = LocalCommunicator(state, timeout)
        if global_ranks is not None:
            group.set_global_ranks(tuple(global_ranks))
        self.failures.add_group(group.state)
        with self._lock:
            self._pending.append(group)
        try:
            begun(group)
            group.start([job.members[rank].host_id for rank in members], self._segment_options, timeout)
        except BaseException as error:
            if not isinstance(error, CollectiveMismatchError):  # which all members have
                group.abort(error)  # a member that comes later counts this attempt, too
            group.close()
            self.failures.replace_group(group.state)  # if this ends the rank, it is the reason
            raise
        finally:
            with self._lock:
                self._pending.remove(group)
        with self._lock:
            self._groups[number] = group
        self.failures.on_group_made()
        return group

    def make_world(self, timeout: float) -> LocalCommunicator:
        """Make the group of all ranks; what these agree on if one host has them all holds for other groups, too."""
        world = self.make(range(self._job.world_size), "world", timeout)
        segment = world.queue.backend.segment
        if segment is not None:
            processes = segment.processes if segment.can_read else ()
            agreement = Agreement(segment.slot_bytes, world.link.shares_cores, processes)
            self._segment_options = self._segment_options._replace(agreement=agreement)
        return world

    def _count_attempt(self, members: tuple[int, ...], http_key: str) -> int:
        """Count an attempt, failed ones too, to make a group: members count alike, and derive its id from that."""
        key = members, http_key
        with self._lock:
            counts = self._http_counts if http_key else self._counts
            count = counts[key] = counts.pop(key, 0) + 1
            if len(self._http_counts) > _MAX_HTTP_COUNTS:
                del self._http_counts[next(iter(self._http_counts))]
        return count

    def make_over_http(
        self, wanted: GroupRequest, timeout: float, begun: Callable[[LocalCommunicator], None]
    ) -> tuple[LocalCommunicator, bool]:
        """Make a group that is requested over HTTP from all its members' agents, within a timeout, then its default.

        Args:
            begun: called with the group before it waits for the members; aborting the group ends the wait.

        Returns:
            The group, and whether it is new: not if this very one, by its instance, exists.

        Raises:
            GroupExistsError: another group has the name.
            DistBackendError: a member did not come, or failed.
        """
        name, key = wanted.name, f"{wanted.name}/{wanted.instance}"
        with self._lock:
            found = next((group for group in self._groups.values() if group.name == name), None)
            if found is not None or name in self._pending_names:
                same = found is not None and wanted.instance and found.ranks == tuple(wanted.ranks)
                if found is not None and same and self._http_keys.get(found.id) == key:
                    return found, False
                raise GroupExistsError(
                    f"there is a group {name!r}: take another name, or DELETE /v1/groups/{name} first", group=name
                )
            self._pending_names.add(name)
        try:
            group = self.make(wanted.ranks, name, timeout, key, begun)
            with self._lock:
                self._http_keys[group.id] = key
        finally:
            with self._lock:
                self._pending_names.discard(name)
        return group, True

    def drop_over_http(self, group: LocalCommunicator) -> None:
        """End a group at this rank that was made over HTTP."""
        with self._lock:
            if self._http_keys.pop(group.id, None) is None:
                raise GroupInUseError(
                    f"group {group.name!r} was not made over HTTP: its job ends it. To end it at all members now, POST "
                    f"/v1/groups/{group.name}/abort",
                    group=group.name,
                )
        self.drop(group, Goodbye("an HTTP client ended it"))

    def drop(self, group: Communicator, how: Goodbye | None = None) -> None:
        """End a group at this rank; see LocalCommunicator.leave."""
        with self._lock:
            found = self._groups.pop(group.id, None)
        if found is not None:
            if how is not None and how.failure is None:
                how = how._replace(reason=after_error(how.reason, self._recorder.last_error()))
            found.leave(how)
        group.close()
        if how is not None and how.failure is not None:
            self.failures.replace_group(group.state)
        else:
            self.failures.remove_group(group.state)

    def reason_to_end(self, rank: int, since: float) -> tuple[DistError | None, list[int]]:
        """See FailureLog; the timeout of a message, which ends no group, is a reason if nothing has succeeded since."""
        error, blamed = self.failures.reason_to_end(rank, since)
        if error is None and math.isfinite(since) and (latest := self._recorder.last_error()):
            for group in self.all():
                timeout = group.messages.timeout
                if timeout is not None and error_text(timeout) == latest:
                    return timeout, [each for each in group.state.job_ranks(timeout) if each != rank]
        return error, blamed

    def abort_pending(self, error: BaseException) -> None:
        """End the groups that are being made, because of an error of their requester."""
        with self._lock:
            pending = list(self._pending)
        for group in pending:
            group.abort(error)

    def abort_all(self, error: DistError) -> None:
        """End the groups that still work, because of an error that names ranks of the job."""
        for group in self.all():
            if group.failure is None:
                numbers = zip(group.state.ranks, group.state.global_ranks, strict=True)
                ranks = [number for rank, number in numbers if rank in error.ranks]
                group.abort(from_code(error.code, error.message, ranks=ranks, group=group.name))

    def leave(self) -> None:
        """End all groups at this rank as far as others notice; see LocalCommunicator.leave."""
        for group in self.all():
            group.leave()

    def close(self) -> None:
        """End all groups at this rank."""
        for group in self.all():
            group.close()
        if self._segment_options.allowed:
            remove_orphans(self._segment_options.directory)  # of ranks that died
