"""Epochs as they are saved: what a gateway that takes over knows of jobs, before their ranks report again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, cast, get_args

from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS, Member
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.rank import RankRecord

Ended = Literal["left", "failed"]


@dataclass
class SavedRank:
    """A rank: see RankRecord. Times are seconds since 1970; ``ended`` is empty for None."""

    member: Member
    last_seen: float
    ended: str
    reason: str
    exited: bool
    failed_ranks: list[int] = field(default_factory=list)
    interval: float = HEARTBEAT_SECONDS


_KEPT = tuple(each.name for each in fields(SavedRank))


@dataclass
class SavedEpoch:
    """An epoch whose world was complete: see Epoch. Its groups come with the next heartbeats of its ranks."""

    job: str
    number: int
    size: int
    since: float
    ranks: list[SavedRank]
    groups: list[str]
    failed_groups: list[str]
    store: str = ""


def save(epoch: Epoch, unix_time: Callable[[float], float]) -> SavedEpoch:
    """Return an epoch as it is saved; ``unix_time``: returns seconds since 1970 for a time of the registry's clock."""
    ranks = []
    for _, record in sorted(epoch.records.items()):
        kept = {name: getattr(record, name) for name in _KEPT}
        ranks.append(SavedRank(**{**kept, "last_seen": unix_time(record.last_seen), "ended": record.ended or ""}))
    since = unix_time(epoch.since if epoch.since is not None else 0.0)
    failed = [group for group, has_failure in epoch.logged_groups.items() if has_failure]
    return SavedEpoch(epoch.job, epoch.number, epoch.size, since, ranks, list(epoch.logged_groups), failed, epoch.store)


def restore(saved: SavedEpoch, clock_time: Callable[[float], float], now: float) -> Epoch:
    """Return the epoch that was saved. A rank that was live counts as just seen: no heartbeat came meanwhile."""
    epoch = Epoch(saved.job, saved.number, saved.size, since=clock_time(saved.since), store=saved.store)
    for each in saved.ranks:
        ended = cast(Ended, each.ended) if each.ended in get_args(Ended) else None
        last_seen = clock_time(each.last_seen) if ended else now
        record = RankRecord(**{**vars(each), "last_seen": last_seen, "ended": ended}, joining=False)
        record.told_interval, record.logged_state = each.interval, ended or "alive"
        epoch.add(record)
    epoch.logged_groups = {group: group in saved.failed_groups for group in saved.groups}
    return epoch
