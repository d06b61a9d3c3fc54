"""What the event log is told of jobs: the changes of a rank's state and of a world's groups, each once.

A rank that falls silent does nothing that could be noticed. Its state is looked at when somebody asks, when any rank or
agent sends a sign of life, and while somebody listens, and the event bears the time when it was so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, UNASSIGNED, GroupInfo
from rankmesh_gateway.state.event_log import EventKind, EventLog
from rankmesh_gateway.state.rank import RankRecord

if TYPE_CHECKING:
    from rankmesh_gateway.state.epoch import Epoch


class EventWriter:
    """Tells the log.

    Args:
        log: where to.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def rank_joining(self, world: Epoch, record: RankRecord) -> None:
        """Somebody has come to a world that forms."""
        record.logged_state = "joining"
        self._log.append(
            "rank-joining",
            f"{record.member.described()} joins: {world.count} of {world.size} are there",
            job=world.job,
            ranks=_ranks(record),
            epoch=world.number,
        )

    def join_abandoned(self, world: Epoch, record: RankRecord) -> None:
        """Somebody has gone from a world that forms."""
        self._log.append(
            "rank-left",
            f"{record.member.described()} no longer joins: it gave up, or its connection broke",
            job=world.job,
            ranks=_ranks(record),
            epoch=world.number,
        )

    def world_complete(self, world: Epoch) -> None:
        """A world has come together."""
        for record in world.records.values():
            record.logged_state = "alive"
        self._log.append(
            "world-complete",
            f"all {world.size} rank(s) of job {world.job!r} are there",
            job=world.job,
            ranks=sorted(world.records),
            epoch=world.number,
        )

    def state_changes(self, world: Epoch, records: Iterable[RankRecord], now: float) -> None:
        """Tell how some ranks are that are otherwise than before."""
        for record in records:
            state = record.state(now)
            if state == record.logged_state or state == "joining":
                continue
            before, record.logged_state = record.logged_state, state
            who, at = record.member.described(), None
            if state == "alive":
                # Of a world that came together at an earlier gateway, the ranks' own words are all there is.
                says = f"{who} is alive" if before is None else f"{who} is alive again, after it was {before}"
                self._add("rank-alive", says, world, record)
            elif state == "suspect":
                at = record.last_seen + SUSPECT_SECONDS
                self._add("rank-suspect", f"no heartbeat of {who} for {SUSPECT_SECONDS:g} s", world, record, at)
            elif state == "failed":
                if not record.reason:
                    at = record.last_seen + FAILED_SECONDS
                why = record.reason or f"no heartbeat for {FAILED_SECONDS:g} s"
                self._add("rank-failed", f"{who} has failed: {why}", world, record, at)
            else:
                self._add("rank-left", f"{who} has left", world, record)

    def group_changes(self, world: Epoch, record: RankRecord, before: list[GroupInfo], now: float) -> None:
        """Tell which groups a rank's report has made, broken or ended."""
        for group in record.groups:
            if group.id not in world.logged_groups:
                world.logged_groups[group.id] = False
                self._add_group("group-made", f"{_named(group)} of ranks {_listed(group.ranks)} is made", world, group)
            if group.failure and not world.logged_groups[group.id]:
                world.logged_groups[group.id] = True
                self._add_group("group-failed", f"{_named(group)} has failed: {group.failure}", world, group)
        kept = {group.id for group in record.groups}
        for group in before:
            if (
                group.id not in kept
                and world.logged_groups.get(group.id) is not None
                and not world.has_group(group.id, now)
            ):
                del world.logged_groups[group.id]
                world.drop_group(group.id)
                self._add_group("group-ended", f"{_named(group)} has ended", world, group)

    def _add(self, kind: EventKind, detail: str, world: Epoch, record: RankRecord, at: float | None = None) -> None:
        self._log.append(kind, detail, at=at, job=world.job, ranks=_ranks(record), epoch=world.number)

    def _add_group(self, kind: EventKind, detail: str, world: Epoch, group: GroupInfo) -> None:
        self._log.append(kind, detail, job=world.job, ranks=group.ranks, group=group.id, epoch=world.number)


def _ranks(record: RankRecord) -> list[int]:
    return [] if record.member.rank == UNASSIGNED else [record.member.rank]


def _named(group: GroupInfo) -> str:
    return f"group {group.name!r}"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"
