"""Epochs as they are saved: what a gateway that takes over knows of jobs, before their ranks report again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS, GroupInfo, Member, RankState
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.rank import RankRecord

Ended = Literal["left", "failed"]


@dataclass
class SavedRank:
    """A rank: see RankRecord. Times are seconds since 1970; ``ended`` and ``logged_state`` are empty for None.

    In files of earlier versions, ``groups`` have their ranks.
    """

    member: Member
    last_seen: float
    ended: str
    reason: str
    exited: bool
    watches_peers: bool
    logged_state: str
    reported_at: float
    failed_ranks: list[int] = field(default_factory=list)
    groups: list[GroupInfo] = field(default_factory=list)
    interval: float = HEARTBEAT_SECONDS


@dataclass
class SavedGroup:
    """The ranks of a group."""

    id: str
    ranks: list[int]


@dataclass
class SavedEpoch:
    """An epoch whose world was complete: see Epoch.

    Attributes:
        groups: the ids of the groups in the event log.
        failed_groups: those of them whose failure it has.
        group_ranks: the ranks of the groups.
    """

    job: str
    number: int
    size: int
    since: float
    ranks: list[SavedRank]
    groups: list[str]
    failed_groups: list[str]
    group_ranks: list[SavedGroup] = field(default_factory=list)
    store: str = ""


def save(epoch: Epoch, unix_time: Callable[[float], float]) -> SavedEpoch:
    """Return an epoch as it is saved; its groups are shared, as reports replace them.

    Args:
        epoch: the epoch.
        unix_time: returns seconds since 1970 for a time of the registry's clock.
    """
    ranks = [
        SavedRank(
            record.member,
            unix_time(record.last_seen),
            record.ended or "",
            record.reason,
            record.exited,
            record.watches_peers,
            record.logged_state or "",
            unix_time(record.reported_at),
            list(record.failed_ranks),
            list(record.groups.values()),
            record.interval,
        )
        for _, record in sorted(epoch.records.items())
    ]
    since = unix_time(epoch.since if epoch.since is not None else 0.0)
    failed = [group for group, has_failure in epoch.logged_groups.items() if has_failure]
    groups = [SavedGroup(group, members) for group, members in epoch.groups.all_ranks().items()]
    logged = list(epoch.logged_groups)
    return SavedEpoch(epoch.job, epoch.number, epoch.size, since, ranks, logged, failed, groups, epoch.store)


def restore(saved: SavedEpoch, clock_time: Callable[[float], float], now: float) -> Epoch:
    """Return the epoch that was saved. A rank that was live counts as just seen: no heartbeat was received meanwhile.

    Args:
        saved: the saved epoch.
        clock_time: returns the time of the registry's clock for seconds since 1970.
        now: the clock.
    """
    epoch = Epoch(saved.job, saved.number, saved.size, since=clock_time(saved.since), store=saved.store)
    for group_ranks in saved.group_ranks:
        epoch.groups.define(group_ranks.id, group_ranks.ranks)
    for each in saved.ranks:
        reported_at = clock_time(each.reported_at)
        record = RankRecord(
            each.member,
            clock_time(each.last_seen) if each.ended else now,
            joining=False,
            ended=cast(Ended, each.ended) if each.ended in get_args(Ended) else None,
            reason=each.reason,
            exited=each.exited,
            failed_ranks=each.failed_ranks,
            watches_peers=each.watches_peers,
            interval=each.interval,
            told_interval=each.interval,
            reported_at=reported_at,
            failed_since={group.id: reported_at for group in each.groups if group.failure},
            logged_state=cast(RankState, each.logged_state) if each.logged_state in get_args(RankState) else None,
        )
        epoch.add(record)
        for group in each.groups:
            epoch.groups.add(record, group)
    epoch.logged_groups = {group: group in saved.failed_groups for group in saved.groups}
    return epoch
