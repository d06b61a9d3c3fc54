"""What the members of a world report of their groups, put together."""

from __future__ import annotations

from rankmesh_agent.wire.schemas import RankGroupInfo
from rankmesh_gateway.world import World


def groups_of(world: World) -> list[RankGroupInfo]:
    """The groups of a world by id. Failed ranks count with their last report, ranks that left in order do not."""
    found: dict[str, RankGroupInfo] = {}
    broken_since: dict[str, float] = {}
    for rank, record in sorted(world.records.items()):
        for group in record.groups:
            merged = found.setdefault(
                group.id,
                RankGroupInfo(world.job, world.epoch, group.id, group.name, group.ranks, group.medium, {}, ""),
            )
            merged.seqs[str(rank)] = group.seq
            if group.failure and record.broken_since[group.id] < broken_since.get(group.id, float("inf")):
                broken_since[group.id] = record.broken_since[group.id]
                merged.failure = group.failure
    return [found[group_id] for group_id in sorted(found)]
