"""Groups and calls in flight of an epoch, merged from the reports of its ranks."""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import RankGroupInfo, suspect_seconds
from rankmesh_gateway.schemas import HELD_UP_SECONDS, GroupInFlight
from rankmesh_gateway.state.epoch import Epoch


class GroupNotFoundError(DistNetworkError):
    """No group, or more than one, has that id or name."""

    code = "group-not-found"
    status = 404


def merged_groups(epoch: Epoch, now: float) -> list[RankGroupInfo]:
    """Return the groups of an epoch by id. Failed ranks count with their last report, ranks that left do not.

    Rates come from recent reports: a group's operations are those of its fastest member, its bytes those of all.
    """
    found: dict[str, RankGroupInfo] = {}
    broken_since: dict[str, float] = {}
    for rank, record in sorted(epoch.records.items()):
        fresh = now - record.reported_at < suspect_seconds(record.interval) and record.is_live()
        for group in record.groups.values():
            ranks = epoch.groups.ranks(group.id)
            if ranks is None:
                continue
            if group.id not in found:
                found[group.id] = RankGroupInfo(
                    epoch.job, epoch.number, group.id, group.name, ranks, group.medium, {}, ""
                )
            merged = found[group.id]
            merged.seqs[str(rank)] = group.seq
            merged.ages[str(rank)] = max(0.0, now - record.reported_at)
            if fresh:
                rate = record.rates.of(group.id)
                merged.operations_rate = max(merged.operations_rate, rate.operations)
                merged.bytes_rate += rate.bytes
                merged.busy[str(rank)] = min(1.0, rate.busy)
            if group.failure and record.failed_since[group.id] < broken_since.get(group.id, float("inf")):
                broken_since[group.id] = record.failed_since[group.id]
                merged.failure = group.failure
    return [found[group_id] for group_id in sorted(found)]


def merged_calls(epoch: Epoch, now: float) -> list[GroupInFlight]:
    """Return the calls in flight of an epoch's groups, by group and sequence number.

    Members that report the call in flight have arrived, members that have begun fewer calls, or do not report the
    group yet, are missing; the others have completed it.
    """
    found: dict[tuple[str, int], GroupInFlight] = {}
    begun: dict[str, dict[int, int]] = {}
    for rank, record in sorted(epoch.records.items()):
        for group in record.groups.values():
            ranks = epoch.groups.ranks(group.id)
            if ranks is None:
                continue
            if group.id not in begun:
                begun[group.id] = {member: 0 for member in ranks if epoch.is_present(member)}
            # A call that begins while its rank reports may be in flight there, and not counted yet.
            begun[group.id][rank] = max([group.seq, *(call.seq for call in group.inflight)])
            if not record.is_live():
                continue
            for call in group.inflight:
                key = (group.id, call.seq)
                if key not in found:
                    found[key] = GroupInFlight(
                        epoch.job, epoch.number, group.id, group.name, call.op, call.seq, 0.0, 0, [], [], {}
                    )
                merged = found[key]
                merged.arrived.append(rank)
                merged.age = max(merged.age, call.age + now - record.reported_at)
                merged.bytes = max(merged.bytes, call.bytes)
                if call.op != merged.op:
                    merged.differing[str(rank)] = call.op
    for (group_id, seq), merged in found.items():
        merged.missing = [rank for rank, number in begun[group_id].items() if number < seq]
        merged.held_up = bool(merged.missing) and merged.age >= HELD_UP_SECONDS
    return [found[key] for key in sorted(found)]


def find_group(epochs: Iterable[Epoch], name: str, now: float) -> tuple[Epoch, RankGroupInfo]:
    """Return the group of that id, or of that name if no other live group has it, and its epoch."""
    found = [(epoch, info) for epoch in epochs for info in merged_groups(epoch, now) if name in (info.id, info.name)]
    if len(found) > 1:  # epochs without a live rank do not count
        found = [(epoch, info) for epoch, info in found if epoch.live_ranks()]
    if len(found) == 1:
        return found[0]
    why = f"no rank reports a group {name!r}; GET /v1/groups lists those there are"
    if found:
        where = ", ".join(f"{info.id} in job {info.job!r}" for _, info in found[:20])
        why = f"{len(found)} groups are called {name!r}: {where}; say which by its id"
    raise GroupNotFoundError(why, group=name)
