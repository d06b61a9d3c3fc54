"""What lets a standalone agent: standalone.Standalone, as the processes that attach to it need it."""

from __future__ import annotations

from typing import Protocol

from rankmesh_agent.agent import Agent
from rankmesh_agent.wire.schemas import Lease, LeaseTerms


class LeaseManager(Protocol):
    """Gives an agent away, to one at a time."""

    def acquire(
        self, wanted: LeaseTerms, lease_id: str = "", *, lends: bool = False, joining: float | None = None
    ) -> tuple[Lease, Agent]:
        """Lease the agent, and have it join the job; returns when the job's world is complete.

        Args:
            wanted: for what.
            lease_id: random name of the lease.
            lends: see Agent.
            joining: seconds the join may take.

        Raises:
            AgentTakenError: somebody else has it.
            LeaseEndedError: it was released meanwhile.
            DistError: the join failed.
        """

    def release(self, lease_id: str, reason: str = "", *, failed: bool = False) -> bool:
        """End a lease, also while ``take`` is at it. From any thread.

        Args:
            lease_id: which.
            reason: why, for the job's other ranks; empty if its holder was done.
            failed: whether its holder died.
        """
