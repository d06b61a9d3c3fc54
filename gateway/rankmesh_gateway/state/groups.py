"""What the members of a world report of their groups, put together."""

from __future__ import annotations

from rankmesh_agent.wire.schemas import SUSPECT_SECONDS, RankGroupInfo
from rankmesh_gateway.schemas import GroupInFlight
from rankmesh_gateway.state.epoch import Epoch


def merged_groups(world: Epoch, now: float) -> list[RankGroupInfo]:
    """The groups of a world by id. Failed ranks count with their last report, ranks that left in order do not.

    Rates are of those whose report is of late: a group does as many operations as its quickest member, and moves the
    bytes of all.
    """
    found: dict[str, RankGroupInfo] = {}
    broken_since: dict[str, float] = {}
    for rank, record in sorted(world.records.items()):
        fresh = now - record.reported_at < SUSPECT_SECONDS and record.is_live(now)
        for group in record.groups:
            merged = found.setdefault(
                group.id,
                RankGroupInfo(world.job, world.number, group.id, group.name, group.ranks, group.medium, {}, ""),
            )
            merged.seqs[str(rank)] = group.seq
            if fresh:
                rate = record.rates.of(group.id)
                merged.operations_rate = max(merged.operations_rate, rate.operations)
                merged.bytes_rate += rate.bytes
            if group.failure and record.failed_since[group.id] < broken_since.get(group.id, float("inf")):
                broken_since[group.id] = record.failed_since[group.id]
                merged.failure = group.failure
    return [found[group_id] for group_id in sorted(found)]


def merged_calls(world: Epoch, now: float) -> list[GroupInFlight]:
    """The calls of a world's groups that have begun and not ended, by group and number.

    Members in whose report the call is under way have arrived, members that have begun fewer calls are missing; the
    others are done with it.
    """
    found: dict[tuple[str, int], GroupInFlight] = {}
    begun: dict[str, dict[int, int]] = {}
    for rank, record in sorted(world.records.items()):
        for group in record.groups:
            begun.setdefault(group.id, {})[rank] = group.seq
            if not record.is_live(now):
                continue
            for call in group.inflight:
                key = (group.id, call.seq)
                if key not in found:
                    found[key] = GroupInFlight(
                        world.job, world.number, group.id, group.name, call.op, call.seq, 0.0, 0, [], [], {}
                    )
                merged = found[key]
                merged.arrived.append(rank)
                merged.age = max(merged.age, call.age + now - record.reported_at)
                merged.bytes = max(merged.bytes, call.bytes)
                if call.op != merged.op:
                    merged.differing[str(rank)] = call.op
    for (group_id, seq), merged in found.items():
        merged.missing = [rank for rank, number in begun[group_id].items() if number < seq]
    return [found[key] for key in sorted(found)]
