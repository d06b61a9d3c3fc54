"""Store of a job, as one of its ranks uses it: the gateway has the keys and values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rankmesh_agent.store.client import Call, StoreClient
from rankmesh_agent.store.command import Command
from rankmesh_agent.wire.errors import (
    DistNetworkError,
    DistStoreError,
    ProtocolError,
    RankFailedError,
    StoreLostError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.schemas import Member
from rankmesh_agent.wire.store_frames import STORE_ID_BYTES

E = TypeVar("E", bound=DistNetworkError)


class JobStore(StoreClient):
    """Access of one rank to its job's store. While the gateway is away, calls wait for it.

    Args:
        store: id of the store, 32 hexadecimal digits.
        exhausted: returns the ranks that have had no free descriptor since a time, with their reports.
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
        reports, ranks = self._reports(seconds) if seconds else ("", [])
        return StoreTimeoutError(f"waited {seconds:g} s, but {found.message}{reports}", ranks=ranks) if ranks else found

    def _unresponsive_error(self, command: Command[Any], timeout: float) -> StoreUnresponsiveError:
        error = super()._unresponsive_error(command, timeout)
        return self._with_reports(error, command.seconds + timeout)

    def _unreachable_error(self, error: Exception) -> DistNetworkError:
        found = super()._unreachable_error(error)
        return found if found is error else self._with_reports(found, math.inf)

    def _with_reports(self, error: E, seconds: float) -> E:
        reports, ranks = self._reports(seconds)
        return type(error)(error.message + reports, address=self._url, ranks=ranks)

    def _reports(self, seconds: float) -> tuple[str, list[int]]:
        """Return the reports and the numbers of the ranks that have had no free descriptor: they may be the cause."""
        exhausted = self._exhausted(time.monotonic() - seconds)
        texts = [f"; {member.described()} reports: {text}" for member, text in exhausted]
        return "".join(texts), [member.rank for member, _ in exhausted]

    def _name(self) -> str:
        return f"the job's store, at the gateway at {self._url},"
