"""Calls in dumps of flight recorders that have neither stacks nor waits, as reports on the ranks that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rankmesh_agent.wire.snapshot import RankSnapshot, SnapshotCall, SnapshotGroup
from rankmesh_gateway.diagnosis.frames import SourceLocation
from rankmesh_gateway.diagnosis.reports import DUMPED, NO_DUMP, RankReport


class RecordedGroup(NamedTuple):
    """A group: its name for users, and the global ranks of its members."""

    name: str
    ranks: Sequence[int]


class RecordedCall(NamedTuple):
    """A call or message of one rank, of which ``peer`` is a global rank; its number is 0 for a message."""

    call: SnapshotCall
    ended: bool
    place: SourceLocation | None = None


def reports_of(
    calls: Mapping[int, Sequence[RecordedCall]], groups: Mapping[str, RecordedGroup], job: str
) -> list[RankReport]:
    """Return the ranks of a job: those with a dump, and those that are missing between them or in a group."""
    size = max([*calls, *(rank for group in groups.values() for rank in group.ranks)]) + 1
    return [
        _report(job, rank, calls[rank], groups) if rank in calls else RankReport(job, 0, rank, "", 0, "", NO_DUMP)
        for rank in range(size)
    ]


def _report(job: str, rank: int, calls: Sequence[RecordedCall], groups: Mapping[str, RecordedGroup]) -> RankReport:
    seqs = {id: max((each.call.seq for each in calls if each.call.group == id), default=0) for id in groups}
    members = [(id, group) for id, group in groups.items() if rank in group.ranks]
    snapshot = RankSnapshot(job, 0, rank, attached=False)
    snapshot.groups = [SnapshotGroup(id, group.name, list(group.ranks), seqs[id]) for id, group in members]
    snapshot.calls = [each.call for each in calls if not each.ended]
    snapshot.ended = [each.call for each in calls if each.ended]
    report = RankReport(job, 0, rank, "", 0, "", DUMPED, snapshot=asdict(snapshot))
    if snapshot.calls:
        report.place = next(each.place for each in calls if not each.ended)
    elif calls:
        last, _, place = calls[-1]
        report.last = f"{last.call}{f' #{last.seq}' if last.seq else ''}{f' at {place}' if place else ''}"
    return report
