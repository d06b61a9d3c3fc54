"""Command by which the owner of a job's store sends its changes to the replica on another host."""

from __future__ import annotations

from dataclasses import dataclass

from rankmesh_agent.store.command import Command
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import DistStoreError

BEGIN, COMPLETE, ABANDON = 0x01, 0x02, 0x04
"""Flags: the first records of a snapshot, which replaces all earlier ones; the last ones of it; the owner goes on
without the replica, and waits for no response."""


@dataclass(frozen=True)
class Replicate(Command[None]):
    """Apply records to the replica; without any, it shows that the owner lives. For connections of the owner alone.

    Attributes:
        flags: see above.
        records: of changes, or of a snapshot.
        owner: the owner's rank, with BEGIN alone.
    """

    flags: int = 0
    records: tuple[bytes, ...] = ()
    owner: int = -1

    def try_execute(self, table: Table) -> tuple[None]:
        raise DistStoreError("records are for a replica, not for a table")
