"""Writer of the event log: each change of a rank's state and of an epoch's groups, once.

A rank that falls silent causes no event by itself. Its state is polled when a client asks, when any rank or agent sends
a heartbeat, and while a client listens; the event has the time of the change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rankmesh_agent.wire.ranges import named_ranks
from rankmesh_agent.wire.schemas import UNASSIGNED, GroupInfo, RankState, failed_seconds, suspect_seconds
from rankmesh_gateway.humanize import failed_text, held_up_text, slow_text, suspect_text
from rankmesh_gateway.schemas import GroupInFlight
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.event_log import EventKind, EventLog
from rankmesh_gateway.state.rank import RankRecord
from rankmesh_gateway.stragglers.lateness import activity

_STATE_EVENTS: dict[RankState, EventKind] = {
    "alive": "rank-alive",
    "suspect": "rank-suspect",
    "failed": "rank-failed",
    "left": "rank-left",
}


class EventWriter:
    """Writes the events of jobs."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def rank_joining(self, epoch: Epoch, record: RankRecord) -> None:
        """Log that a process has joined a forming epoch."""
        record.logged_state = "joining"
        detail = f"{record.member.described()} has joined: {epoch.count} of {_ranks(epoch.size)}"
        self._rank_event("rank-joining", detail, epoch, record)

    def rank_waiting(self, epoch: Epoch, record: RankRecord) -> None:
        """Log that a process waits for the world to grow."""
        detail = f"{record.member.described()} waits for the world of job {epoch.job!r} to grow"
        self._rank_event("rank-joining", detail, epoch, record)

    def join_abandoned(self, epoch: Epoch, record: RankRecord) -> None:
        """Log that a process no longer joins a forming epoch."""
        detail = f"{record.member.described()} no longer joins: it gave up, or its connection broke"
        self._rank_event("rank-left", detail, epoch, record)

    def world_complete(self, epoch: Epoch) -> None:
        """Log that the world of an epoch is complete."""
        for record in epoch.records.values():
            record.logged_state = "alive"
        detail = f"the world of job {epoch.job!r} is complete: {_ranks(epoch.size)}"
        self._log.append("world-complete", detail, job=epoch.job, ranks=sorted(epoch.records), epoch=epoch.number)

    def job_restarted(self, job: str, epoch: int, attempt: int, reason: str) -> None:
        """Log that a launcher restarts a job, and that the epochs up to a number have ended."""
        detail = f"all ranks of job {job!r} start again: restart {attempt}" + (f", {reason}" if reason else "")
        self._log.append("job-restarted", detail, job=job, epoch=epoch)

    def state_changes(self, epoch: Epoch, records: Iterable[RankRecord], now: float) -> None:
        """Log the states of ranks that differ from those in the log."""
        for record in records:
            state = record.state(now)
            if state == record.logged_state or state == "joining":
                continue
            before, record.logged_state = record.logged_state, state
            rank, at = record.member.described(), None
            if state == "alive":
                # Of a world that was complete at an earlier gateway, the ranks' own reports are all there is.
                detail = f"{rank} is alive" if before is None else f"{rank} is alive again, after it was {before}"
            elif state == "suspect":
                seconds = suspect_seconds(record.interval)
                at = record.last_seen + seconds
                detail = suspect_text(rank, seconds)
            elif state == "failed":
                seconds = failed_seconds(record.interval)
                if not record.reason:
                    at = record.last_seen + seconds
                detail = failed_text(rank, record.reason or f"no heartbeat for {seconds:g} s")
            else:
                detail = f"{rank} has left"
            self._rank_event(_STATE_EVENTS[state], detail, epoch, record, at)

    def group_changes(self, epoch: Epoch, reported: Iterable[GroupInfo], ended: Iterable[GroupInfo]) -> None:
        """Log the groups that a rank's report creates, fails or ends."""
        for group in reported:
            ranks = epoch.groups.ranks(group.id)
            if ranks is not None and group.id not in epoch.logged_groups:
                epoch.logged_groups[group.id] = False
                self._group_event("group-made", f"of {_listed(ranks)} is made", epoch, group)
            if group.failure and epoch.logged_groups.get(group.id) is False:
                epoch.logged_groups[group.id] = True
                self._group_event("group-failed", f"has failed: {group.failure}", epoch, group)
        for group in ended:
            if group.id in epoch.logged_groups and not epoch.has_group(group.id):
                del epoch.logged_groups[group.id]
                self._group_event("group-ended", "has ended", epoch, group)
                epoch.groups.drop(group.id, epoch.records)

    def held_up_calls(self, epoch: Epoch, calls: Iterable[GroupInFlight], now: float) -> None:
        """Log the calls that have come to be held up, and those that were and have ended."""
        present = {(call.group, call.seq): call for call in calls}
        for key in epoch.logged_calls.keys() - present.keys():
            began, call = epoch.logged_calls.pop(key)
            self._call_event("call-ended", replace(call, age=now - began), epoch, now, ", and has ended")
        for key, call in present.items():
            if call.held_up and key not in epoch.logged_calls:
                epoch.logged_calls[key] = (now - call.age, call)
                self._call_event("call-held-up", call, epoch, now)

    def slow_ranks(self, epoch: Epoch, now: float) -> None:
        """Log the ranks that have come to be slow, and those that no longer are."""
        scores = epoch.scores
        for rank in sorted(scores.slow.keys() ^ epoch.logged_slow):
            record, score = epoch.records[rank], scores.values.get(rank, 0.0)
            if rank in scores.slow:
                does = activity([rank], scores.usage())
                detail = slow_text(record.member.described(), score, now - scores.slow[rank], does)
                self._rank_event("rank-slow", detail, epoch, record)
            elif record.is_live():
                detail = f"{record.member.described()} no longer makes the others wait"
                self._rank_event("rank-in-time", detail, epoch, record)
        epoch.logged_slow = {*scores.slow}

    def _call_event(self, kind: EventKind, call: GroupInFlight, epoch: Epoch, now: float, end: str = "") -> None:
        found = (epoch.records[rank] for rank in call.missing if rank in epoch.records)
        known = {each.member.rank: f" ({each.member.host}, pid {each.member.pid}, {each.state(now)})" for each in found}
        detail = held_up_text(call, f"group {call.name}", known) + end
        self._log.append(kind, detail, job=epoch.job, ranks=call.missing, group=call.group, epoch=epoch.number)

    def _rank_event(
        self, kind: EventKind, detail: str, epoch: Epoch, record: RankRecord, at: float | None = None
    ) -> None:
        ranks = [] if record.member.rank == UNASSIGNED else [record.member.rank]
        self._log.append(kind, detail, at=at, job=epoch.job, ranks=ranks, epoch=epoch.number)

    def _group_event(self, kind: EventKind, detail: str, epoch: Epoch, group: GroupInfo) -> None:
        detail = f"group {group.name} {detail}"
        ranks = epoch.groups.ranks(group.id) or []
        self._log.append(kind, detail, job=epoch.job, ranks=ranks, group=group.id, epoch=epoch.number)


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _listed(ranks: list[int]) -> str:
    shown = named_ranks(ranks[:16])
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"
