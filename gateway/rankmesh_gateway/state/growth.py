"""Growth of a job's world: the processes that wait for it, and the epoch that they and the world's ranks form."""

from __future__ import annotations

from rankmesh_agent.wire.errors import WorldSizeMismatchError
from rankmesh_agent.wire.schemas import GrowingWorld, JoinRequest, Member
from rankmesh_gateway.state.epoch import Epoch


class Growth:
    """The next growth of a job's world.

    A process on the wait list gets a place in the epoch that the ranks of the world form when they grow it, or if that
    has no room, in a later one. If the ranks give up, it is on the wait list again.

    Attributes:
        forming: the epoch of the growth that is under way; None without one.
        wait_list: the other processes that wait, as the unassigned ranks of an epoch that never is complete.
    """

    def __init__(self, job: str) -> None:
        self.forming: Epoch | None = None
        self.wait_list = Epoch(job, 0, 0)
        self._job = job
        self._world: GrowingWorld | None = None
        """The world that grows."""

    @property
    def grown_from(self) -> int:
        """The epoch that grows, or grew last; 0 without one."""
        return 0 if self._world is None else self._world.epoch

    def epochs(self) -> tuple[Epoch, ...]:
        """Return the epochs whose processes wait."""
        return (self.wait_list,) if self.forming is None else (self.forming, self.wait_list)

    def epoch_of(self, member: Member) -> Epoch:
        """Return the epoch in which a process waits; without one, the wait list."""
        return next((each for each in self.epochs() if each.find(member.rank, member.instance)), self.wait_list)

    def waiting(self) -> list[Member]:
        """Return the waiting processes, in the order in which they came."""
        return [record.member for epoch in self.epochs() for record in epoch.unassigned.values()]

    def join(self, request: JoinRequest, number: int, now: float) -> Epoch:
        """Admit a process that awaits the growth, or a rank of the world that grows; return its epoch."""
        member = request.member
        if request.growth is None:
            self.epoch_of(member).admit(member, now)
        else:
            if self.forming is not None and self._world != request.growth:
                raise WorldSizeMismatchError(
                    f"{member.described()} grows a world of {request.growth.size} ranks of epoch "
                    f"{request.growth.epoch}, but other ranks of job {self._job!r} grow another one: has the world "
                    "split? End one part of it, or wait until the other growth has ended",
                    ranks=[member.rank],
                )
            epoch = self.forming or Epoch(self._job, number, request.world_size, grown=True)
            epoch.check_world_size(request.world_size, member)
            epoch.check_rank_free(member, now)
            epoch.admit(member, now)
            self.forming, self._world = epoch, request.growth
        self.settle()
        return self.epoch_of(member)

    def settle(self) -> None:
        """Give the free places of the forming epoch to the wait list; end that if none of the world's ranks is left."""
        forming, queue = self.forming, self.wait_list
        if forming is None:
            return
        ended = not forming.records
        source, target, count = (forming, queue, len(forming.unassigned)) if ended else (queue, forming, self._free())
        for record in list(source.unassigned.values())[:count]:
            source.remove(record)
            target.add(record)
        if ended:
            self.forming = None

    def _free(self) -> int:
        """Return how many waiting processes the forming epoch has room for."""
        if self.forming is None or self._world is None:
            return 0
        return max(0, self.forming.size - self._world.size - len(self.forming.unassigned))
