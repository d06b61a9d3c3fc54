"""Store of a job, as one of its ranks uses it: the gateway has the keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rankmesh_agent.store.client import Call, StoreClient
from rankmesh_agent.wire.errors import DistStoreError, ProtocolError, RankFailedError, StoreLostError, StoreTimeoutError
from rankmesh_agent.wire.schemas import Member
from rankmesh_agent.wire.store_frames import STORE_ID_BYTES


class JobStore(StoreClient):
    """Access of one rank to its job's store. While the gateway is away, calls wait for it.

    Args:
        url: base URL of the job's gateway.
        token: the job's token.
        store: id of the store, 32 hexadecimal digits.
        exhausted: returns the ranks that have had no free descriptor since a time, with their reports.

    Attributes:
        id: id of the store.
    """

    returns = True

    def __init__(
        self,
        url: str,
        token: str,
        store: str,
        exhausted: Callable[[float], Sequence[tuple[Member, str]]] = lambda since: (),
    ) -> None:
        if len(store) != 2 * STORE_ID_BYTES:
            raise ProtocolError(f"the gateway at {url} does not name the job's store: is it of an earlier version?")
        super().__init__(url, token, bytes.fromhex(store))
        self.id = store
        self._exhausted = exhausted

    def check_same(self, store: str) -> None:
        """Raise StoreLostError unless the job still has this store, under the id ``store``."""
        if store != self.id:
            raise StoreLostError(
                f"the job's store is lost: its gateway at {self._url} was started after the job, without the file of "
                "its state (rankmesh gateway --state FILE, or --store)"
            )

    def _wait_error(self, call: Call[Any], error: DistStoreError) -> DistStoreError | RankFailedError:
        seconds, found = call.command.seconds, super()._wait_error(call, error)
        exhausted = self._exhausted(time.monotonic() - seconds) if seconds else ()
        if not exhausted:  # else the cause may be a rank that has no free descriptor
            return found
        reports = "; ".join(f"{member.described()} reports: {text}" for member, text in exhausted)
        return StoreTimeoutError(
            f"waited {seconds:g} s, but {found.message}; {reports}", ranks=[member.rank for member, _ in exhausted]
        )

    def _name(self) -> str:
        return f"the job's store, at the gateway at {self._url},"
