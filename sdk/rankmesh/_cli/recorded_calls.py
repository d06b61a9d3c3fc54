"""Calls in dumps of flight recorders that have neither stacks nor waits, as reports on the ranks that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rankmesh_gateway.diagnosis.frames import SourceLocation
from rankmesh_gateway.diagnosis.reports import DUMPED, NO_DUMP, RankReport


class RecordedGroup(NamedTuple):
    """A group: its name for users, and the global ranks of its members."""

    name: str
    ranks: Sequence[int]


class RecordedCall(NamedTuple):
    """A call or message of one rank.

    Attributes:
        group: id of the group.
        seq: number of a collective; 0 for a message.
        op, call: see SnapshotCall.
        peer, tag: of a message, the global rank at its other end, -1 for any; and its tag.
        age: seconds since it began, or, if it has ended, since its end.
        ended: whether it has ended.
        error: the reason of its failure.
        place: the innermost line of the user's code.
    """

    group: str
    seq: int
    op: str
    call: str
    age: float
    ended: bool
    peer: int | None = None
    tag: int = 0
    error: str = ""
    place: SourceLocation | None = None


def reports_of(
    calls: Mapping[int, Sequence[RecordedCall]], groups: Mapping[str, RecordedGroup], job: str
) -> list[RankReport]:
    """Return the ranks of a job: those with a dump, and those that are missing between them or in a group.

    Args:
        calls: the calls of each rank with a dump, in their order.
        groups: the groups by id.
        job: name of the job, for the reports.
    """
    size = max([*calls, *(rank for group in groups.values() for rank in group.ranks)]) + 1
    return [
        _report(job, rank, calls[rank], groups) if rank in calls else RankReport(job, 0, rank, "", 0, "", NO_DUMP)
        for rank in range(size)
    ]


def _report(job: str, rank: int, calls: Sequence[RecordedCall], groups: Mapping[str, RecordedGroup]) -> RankReport:
    report = RankReport(job, 0, rank, "", 0, "", DUMPED)
    active, ended = [each for each in calls if not each.ended], [each for each in calls if each.ended]
    report.snapshot = {
        "attached": False,
        "groups": [
            {"id": id, "name": group.name, "ranks": list(group.ranks), "seq": _latest(calls, id)}
            for id, group in groups.items()
            if rank in group.ranks
        ],
        "calls": [_document(each) for each in active],
        "ended": [_document(each) for each in ended],
        "store_waits": [],
        "stacks": [],
    }
    if active:
        report.place = active[0].place
    elif ended:
        last = ended[-1]
        report.last = f"{last.call}{f' #{last.seq}' if last.seq else ''}{f' at {last.place}' if last.place else ''}"
    return report


def _latest(calls: Sequence[RecordedCall], group: str) -> int:
    return max((each.seq for each in calls if each.group == group), default=0)


def _document(call: RecordedCall) -> dict[str, Any]:
    """Return a call in the JSON of SnapshotCall."""
    found = call._asdict()
    del found["ended"], found["place"]
    return {**found, "awaited": True}
