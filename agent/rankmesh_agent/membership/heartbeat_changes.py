"""Contents of heartbeats: the first one is complete, the next ones name what has changed since the last reply."""

from __future__ import annotations

from dataclasses import replace

from rankmesh_agent.wire.schemas import LISTED_RANKS, GroupInfo, Heartbeat, HeartbeatReply


class HeartbeatChanges:
    """Changes of one rank's groups and of the ranks that it has lost, as the gateway does not know them yet."""

    def __init__(self) -> None:
        self._number = 0
        self._sent: dict[str, GroupInfo] = {}
        self._sent_lost: set[int] = set()
        self._wanted: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Make the next heartbeat complete: it is not known whether the gateway has recorded the last one."""
        self._known: dict[str, GroupInfo] = {}
        self._known_lost: set[int] = set()
        self._acknowledged = self._failed_version = 0

    def reduced(self, beat: Heartbeat) -> Heartbeat:
        """Return a complete heartbeat as it is sent."""
        self._number += 1
        self._sent = {group.id: group for group in beat.groups}
        self._sent_lost = {each.rank for each in beat.lost}
        return replace(
            beat,
            groups=[
                self._reported(group, beat.member.rank)
                for group in beat.groups
                if group.id in self._wanted or self._known.get(group.id) != group
            ],
            lost=[each for each in beat.lost if each.rank not in self._known_lost],
            number=self._number,
            changes_since=self._acknowledged,
            ended_groups=[group for group in self._known if group not in self._sent],
            failed_version=self._failed_version,
        )

    def acknowledge(self, reply: HeartbeatReply) -> bool:
        """Record the reply to the last heartbeat; return whether the gateway needs another one now."""
        if reply.resend:
            self.forget()
        else:
            self._known, self._known_lost, self._acknowledged = self._sent, self._sent_lost, self._number
            self._failed_version = reply.failed_version
        self._wanted = set(reply.unknown_groups)
        return reply.resend or bool(self._wanted)

    def _reported(self, group: GroupInfo, rank: int) -> GroupInfo:
        new = group.id not in self._known and (len(group.ranks) <= LISTED_RANKS or rank == group.ranks[0])
        return group if new or group.id in self._wanted else replace(group, ranks=[])
