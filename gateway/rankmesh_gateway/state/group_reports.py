"""Groups of an epoch as its ranks report them: each group's ranks once, and which ranks have it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from rankmesh_agent.wire.schemas import GroupInfo, Heartbeat
from rankmesh_gateway.state.rank import RankRecord
from rankmesh_gateway.state.validation import MAX_GROUPS


@dataclass
class GroupChanges:
    """Changes by a heartbeat; ``resend``: there are none, for it names changes since one that is not known."""

    reported: list[GroupInfo] = field(default_factory=list)
    ended: list[GroupInfo] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    dropped: int = 0
    resend: bool = False


class GroupReports:
    """The groups of an epoch. A rank's own report of a group, without the group's ranks, is in its record."""

    def __init__(self) -> None:
        self._ranks: dict[str, list[int]] = {}
        self._holders: dict[str, set[int]] = {}
        self._awaited: dict[str, float] = {}
        """The clock when the ranks of a group began to be awaited, or when a member was asked for them."""

    def ranks(self, group: str) -> list[int] | None:
        """Return the global ranks of a group by group rank; None while no member has reported them."""
        return self._ranks.get(group)

    def holders(self, group: str) -> Set[int]:
        """Return the global ranks that have a group, or had it when they failed."""
        return self._holders.get(group, set())

    def report(self, record: RankRecord, beat: Heartbeat, now: float) -> GroupChanges:
        """Record the groups of a rank's heartbeat; one that an earlier connection has delayed changes nothing."""
        if beat.number and beat.number <= record.number:
            return GroupChanges()
        if beat.changes_since and beat.changes_since != record.number:
            return GroupChanges(resend=True)
        record.number = beat.number
        if beat.changes_since:
            ended: Sequence[str] = [group for group in beat.ended_groups if group in record.groups]
        else:
            kept = {group.id for group in beat.groups}
            ended = [group for group in record.groups if group not in kept]
        changes = GroupChanges(ended=[self._end(record, group) for group in ended])
        for group in beat.groups:
            if group.id not in record.groups and len(record.groups) >= MAX_GROUPS:
                changes.dropped += 1
            else:
                changes.reported.append(self.add(record, group))
                if group.id not in self._ranks and self._is_time_to_ask(group.id, 2 * record.interval, now):
                    changes.unknown.append(group.id)
        return changes

    def add(self, record: RankRecord, group: GroupInfo) -> GroupInfo:
        """Record one rank's report of a group; return it as it is kept."""
        if group.ranks:
            self._ranks.setdefault(group.id, group.ranks)
            self._awaited.pop(group.id, None)
            group = replace(group, ranks=[])
        record.groups[group.id] = group
        self._holders.setdefault(group.id, set()).add(record.member.rank)
        return group

    def forget(self, record: RankRecord) -> None:
        """Record that a rank has no group any more."""
        for group in list(record.groups):
            self._end(record, group)

    def drop(self, group: str, records: dict[int, RankRecord]) -> None:
        """Forget a group that ranks had when they failed."""
        for rank in self._holders.pop(group, ()):
            records[rank].groups.pop(group, None)
        self._ranks.pop(group, None)

    def _is_time_to_ask(self, group: str, seconds: float, now: float) -> bool:
        """Return whether to ask a member for the ranks of a group: the first one reports them without being asked."""
        asked = self._awaited.setdefault(group, now)
        if now - asked < seconds:
            return False
        self._awaited[group] = now
        return True

    def _end(self, record: RankRecord, group: str) -> GroupInfo:
        holders = self._holders.get(group)
        if holders is not None:
            holders.discard(record.member.rank)
            if not holders:
                del self._holders[group]
                self._awaited.pop(group, None)
        return record.groups.pop(group)
