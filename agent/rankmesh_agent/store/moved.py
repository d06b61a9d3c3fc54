"""Error of a rank that is asked for the job's store and does not own it; clients follow it to the owner."""

from __future__ import annotations

from rankmesh_agent.wire.errors import DistNetworkError


class StoreMovedError(DistNetworkError):
    """The rank that was asked does not own the store, and has not executed the command."""

    code = "store-moved"
    status = 421
    retryable = True

    @classmethod
    def to(cls, owner: int | None) -> StoreMovedError:
        """Return the error of a rank that knows the owner, or None if it never will own a store itself."""
        if owner is None:
            return cls("this rank has no copy of the job's store")
        return cls(f"rank {owner} has the job's store", ranks=[owner])

    @property
    def owner(self) -> int | None:
        """The rank to ask; None if the one that was asked has no copy of the store."""
        return self.ranks[0] if self.ranks else None
