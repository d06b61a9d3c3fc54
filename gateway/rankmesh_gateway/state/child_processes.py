"""The processes that descend from a launcher's ranks, as members of the launcher's job."""

from __future__ import annotations

from rankmesh_agent.wire.errors import RankTakenError
from rankmesh_agent.wire.schemas import JoinRequest, Member
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.rank import RankRecord


class ChildProcesses:
    """The members of a launcher's job by their parents, the launcher's ranks.

    The members of a world have a parent each, or all the same one. Otherwise ranks start jobs of their own at the
    launcher's address, and a world of the ranks of two such jobs could become complete.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._records: dict[str, RankRecord] = {}
        self._disputed: dict[tuple[str, int], str] = {}
        """Why processes cannot join, by host and pid."""

    def add(self, request: JoinRequest, record: RankRecord) -> None:
        """Record a member's parent."""
        if request.parent.rpartition("/")[0] == self._job:
            record.parent = request.parent
            self._records[request.parent] = record

    def dispute(self, request: JoinRequest, forming: Epoch | None, latest: Epoch | None) -> RankRecord | None:
        """Return the member that a join of the same parent conflicts with, None without a conflict."""
        parent = request.parent
        if parent.rpartition("/")[0] != self._job:
            return None
        process = _process(request.member)
        if process in self._disputed:
            raise self.refusal(request)
        record = self._records.get(parent)
        epoch = next((each for each in (forming, latest) if record is not None and _has(each, record)), None)
        if record is None or epoch is None or not record.is_live():
            first = [] if forming is None else forming.all_records()[:2]
            if len(first) < 2 or not first[0].parent or first[0].parent != first[1].parent:
                return None
            self._disputed[process] = self._text(request, first[0])
            raise self.refusal(request)
        if _process(record.member) == process:
            return None
        if record.member.pid in request.ancestors and record.member.rank != request.member.rank:
            self._disputed[process] = self._text(request, record)
            raise self.refusal(request)
        if record.member.pid in request.ancestors or all(each.parent == parent for each in epoch.all_records()):
            return None
        self._disputed[process] = self._disputed[_process(record.member)] = self._text(request, record)
        return record

    def refusal(self, request: JoinRequest) -> RankTakenError:
        """Return the error for the joins of a process whose place is in doubt."""
        return RankTakenError(self._disputed[_process(request.member)], ranks=[request.member.rank])

    def _text(self, request: JoinRequest, record: RankRecord) -> str:
        parents = sorted({each.rpartition("/")[2] for each in (request.parent, record.parent)})
        return (
            f"{request.member.described()} and {record.member.described()}, which the launcher's rank"
            f"{'s' * (len(parents) > 1)} {' and '.join(parents)} started, both join the launcher's job {self._job!r}: "
            "a job that a rank starts needs a MASTER_PORT of its own, set in each of its processes"
        )


def _has(epoch: Epoch | None, record: RankRecord) -> bool:
    return epoch is not None and epoch.find(record.member.rank, record.member.instance) is record


def _process(member: Member) -> tuple[str, int]:
    return member.host_id, member.pid
