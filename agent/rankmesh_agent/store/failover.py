"""Clients of a job's store: they use the table while this rank is its owner, and follow the owner otherwise.

A request whose owner is gone is repeated at the next one under its identity, so it is executed once. A command that
waits goes on waiting there for the time that is left, if the owner has left in order; if it has failed, the wait ends
as every wait that is under way when a rank fails.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rankmesh_agent.net.fork import import_lock
from rankmesh_agent.store.base import AsyncStore, BlockingStore, KeyWaitInfo, unresponsive_error
from rankmesh_agent.store.client import RankLabel, RetryState, StoreClient
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.commands import QueuePop
from rankmesh_agent.store.key_waits import KeyWaits, failed_wait_error
from rankmesh_agent.store.memory import MemoryStore, wait_here
from rankmesh_agent.store.moved import StoreMovedError
from rankmesh_agent.store.ownership import Ownership
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    KeyNotFoundError,
    QueueEmptyError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.schemas import Member

if TYPE_CHECKING:
    from rankmesh_agent.store.http_client import HttpStore

FAILOVER_SECONDS = 15.0
"""Seconds after which an owner that cannot be reached, though it has not failed, is an error."""
FORWARD_SECONDS = 20.0
"""Seconds, besides the time that a command waits, in which the owner must respond to another agent's request."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05

T = TypeVar("T")


class OwnerCache:
    """Latest known owner of the store, and the members, for the clients of one rank.

    Args:
        ownership: this rank's part in the ownership.
        members: all ranks, by rank.
        has_left: returns whether this rank has left the job.

    Attributes:
        current: the latest known owner.
        world: the ranks in the world now, by number.
        limits: returns the ranks that have had no free descriptor since a time, with their reports.
        on_unreachable: called with a rank whose store does not answer.
    """

    def __init__(self, ownership: Ownership, members: Mapping[int, Member], has_left: Callable[[], bool]) -> None:
        self.ownership = ownership
        self.members = members
        self.has_left = has_left
        self.current = min(members)
        self.world: Sequence[int] = sorted(members)
        self.limits: Callable[[float], Mapping[int, str]] = lambda since: {}
        self.on_unreachable: Callable[[int], None] = lambda rank: None

    def renumber(self, world: Sequence[int]) -> None:
        """Name the ranks by their places in the world, which has shrunk, from now on."""
        self.world = world

    def named(self, rank: int) -> RankLabel:
        """Return a rank for error messages."""
        if rank in self.world:
            number = self.world.index(rank)
            return RankLabel(replace(self.members[rank], rank=number).described(), (number,))
        return RankLabel(f"{self.members[rank].described()} of the first world", ())

    def wait_error(self, command: Command[T], error: DistStoreError) -> DistStoreError:
        """Return the error of a command that waited in vain; the cause may be a rank that has no free descriptor."""
        limits = self.limits(time.monotonic() - command.seconds) if command.seconds else {}
        if not limits:
            return error
        found = [(self.named(rank), text) for rank, text in limits.items()]
        reports = "; ".join(f"{label.text} reports: {text}" for label, text in found)
        return StoreTimeoutError(
            f"waited {command.seconds:g} s, but {error.message}; {reports}",
            ranks=[number for label, _ in found for number in label.ranks],
        )


class Failover:
    """Search of one call for the present owner, after an attempt has failed.

    Args:
        owners: the owner cache.
        asked: the rank that was asked.

    Attributes:
        rank: the rank to ask next.
    """

    def __init__(self, owners: OwnerCache, asked: int) -> None:
        self.rank = asked
        self._owners = owners
        self._excluded: set[int] = set()
        self._asked = {asked}
        self._since = time.monotonic()
        self._pause = _FIRST_PAUSE

    def failed(self, error: DistNetworkError) -> float:
        """Find the rank to ask next, and return how long to pause before.

        Args:
            error: of the latest attempt.

        Raises:
            DistNetworkError: no further attempt can succeed.
        """
        owners, rank = self._owners, None
        if owners.has_left():
            raise error
        if not isinstance(error, StoreMovedError):
            owners.on_unreachable(self.rank)
        else:
            rank = error.owner
            if rank is None:
                self._excluded.add(self.rank)
            elif owners.ownership.is_excluded(rank) or rank in self._excluded:  # which the rank asked has yet to learn
                rank = None
        if rank is None or rank == self.rank:
            rank = owners.ownership.owner(self._excluded)
        if rank is None:
            lost = [owners.named(rank) for rank in owners.ownership.holders(owners.world)]
            names = ", ".join(each.text for each in lost)
            raise DistNetworkError(
                f"the job's store is lost with {names}: no rank that is left has a copy",
                ranks=[rank for each in lost for rank in each.ranks],
            ) from error
        if rank not in self._asked:
            self._asked.add(rank)
            self._since, self._pause = time.monotonic(), _FIRST_PAUSE
        elif time.monotonic() - self._since > FAILOVER_SECONDS:
            raise self._takeover_error(error)
        self.rank = owners.current = rank
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause

    def _takeover_error(self, error: DistNetworkError) -> DistNetworkError:
        """Return the error of a search that has led to no owner, given that of the latest attempt."""
        if not isinstance(error, StoreMovedError):
            return error
        asked = self._owners.named(self.rank)
        return DistNetworkError(
            f"no rank has taken over the job's store within {FAILOVER_SECONDS:g} s: {asked.text} was asked last: "
            f"{error.message}",
            ranks=asked.ranks,
        )


class BlockingJobStore(BlockingStore):
    """The job's store for callers without an event loop.

    Args:
        owners: the owner cache.
        table: the keys and values, while this rank is the owner.
        token: the job's token.
    """

    def __init__(self, owners: OwnerCache, table: Table, token: str) -> None:
        self._owners = owners
        self._ownership = owners.ownership
        self._table = table
        self._token = token
        self._waits = KeyWaits()
        self._clients: dict[int, StoreClient] = {}

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        ownership = self._ownership
        mine = ownership.mine
        if ownership.words[0] != mine:
            return self._follow(command, timeout)
        self._table.count_call(command.name)
        ends, failures = 0.0, self.failures
        try:
            found = command.try_execute(self._table)
            if found is None:
                ends = time.monotonic() + command.seconds
                found = (wait_here(command, self._table, self._waits),)
        except StoreMovedError:  # it was not executed
            pass
        except DistStoreError as error:
            if ownership.words[0] == mine:
                raise self._owners.wait_error(command, error) from None
        else:
            if ownership.words[0] == mine:
                return found[0]
            if command.writes:
                raise DistNetworkError(
                    f"another rank became the owner of the job's store during {command.name}: whether it was executed "
                    "is not known"
                )
        return self._follow(_remaining(command, ends), timeout, failures)

    def waits_under_way(self) -> bool:
        return bool(self._waits) or any(client.waits_under_way() for client in list(self._clients.values()))

    def pending_waits(self) -> list[KeyWaitInfo]:
        clients = list(self._clients.values())
        return [*self._waits.pending(), *(wait for client in clients for wait in client.pending_waits())]

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        super().fail_waits(failure, for_good=for_good)
        self._waits.fail(failure, for_good=for_good)
        for client in list(self._clients.values()):
            client.fail_waits(failure, for_good=for_good)

    def undo(self, command: QueuePop, value: bytes) -> None:
        ownership = self._ownership
        mine = ownership.mine
        if ownership.words[0] == mine:
            command.undo(self._table, value)
        if ownership.words[0] != mine:
            super().undo(command, value)

    def close(self) -> None:
        """Close all connections; calls in progress end with an error."""
        for client in list(self._clients.values()):
            client.close()

    def close_in_child(self) -> None:
        for client in self._clients.values():
            client.close_in_child()

    def _follow(self, command: Command[T], timeout: float | None, failures: tuple[DistError, ...] | None = None) -> T:
        """Execute a command at the owner, whichever rank that is.

        Args:
            command: the command.
            timeout: see ``execute``.
            failures: those before the call; now, if None.
        """
        failures = self.failures if failures is None else failures
        waits = command.seconds > 0.0
        rank = self._owners.current
        attempt = RetryState(failures)
        failover: Failover | None = None
        ends = time.monotonic() + command.seconds
        timeout = left = self.limit(command) if timeout is None else timeout
        wanted, over = command, ends + timeout
        while True:
            try:
                return self._client(rank).execute(command, left, attempt)
            except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
                failure = self.failure_since(failures) if waits and not command.seconds else None
                if failure is not None:
                    raise failed_wait_error(failure, self._owners.wait_error(wanted, error)) from None
                if not isinstance(error, StoreUnresponsiveError):
                    raise self._owners.wait_error(wanted, error) from None
                if failover is not None:
                    raise self._client(rank).unresponsive_error(wanted, timeout) from error
                raise
            except DistNetworkError as error:
                if not attempt.may_follow(error):
                    raise
                failover = failover or Failover(self._owners, rank)
                try:
                    pause = failover.failed(error)
                    if time.monotonic() >= over:
                        raise self._client(rank).unresponsive_error(wanted, timeout) from error
                except DistNetworkError as lost:
                    failure = self.failure_since(failures) if waits else None
                    if failure is None:
                        raise
                    raise failed_wait_error(failure, lost) from lost
            time.sleep(pause)
            rank = failover.rank
            # A wait that a failure has ended is over, unless its keys have been set.
            command = _remaining(command, 0.0 if waits and self.failure_since(failures) else ends)
            left = max(0.0, min(timeout, over - time.monotonic()))

    def _client(self, rank: int) -> StoreClient:
        client = self._clients.get(rank)
        if client is None:
            url, owner = self._owners.members[rank].http, partial(self._owners.named, rank)
            client = self._clients.setdefault(rank, StoreClient(url, self._token, owner))
            client.failures = self.failures
        return client


class AsyncJobStore(AsyncStore):
    """The job's store for callers with an event loop.

    Args:
        owners: the owner cache.
        memory: the keys and values, while this rank is the owner.
        token: the job's token.
        forwards: whether it sends commands to the owner; otherwise it raises StoreMovedError where this rank is not.
    """

    def __init__(self, owners: OwnerCache, memory: MemoryStore, token: str, *, forwards: bool = True) -> None:
        self._owners = owners
        self._memory = memory
        self._token = token
        self._forwards = forwards
        self._failures: tuple[DistError, ...] = ()
        self._clients: dict[int, HttpStore] = {}

    @property
    def local(self) -> AsyncStore:
        return AsyncJobStore(self._owners, self._memory, self._token, forwards=False)

    async def execute(self, command: Command[T], idempotency_key: str = "") -> T:
        import asyncio  # the caller has loaded it

        ownership = self._owners.ownership
        key = idempotency_key or (secrets.token_hex(16) if command.writes else "")
        ends = time.monotonic() + command.seconds
        rank = self._owners.current
        failures = self._failures
        failover: Failover | None = None
        while True:
            try:
                if ownership.owned if self._forwards else ownership.acquire():
                    mine = ownership.mine
                    try:
                        found = await self._memory.execute(command, key)
                    except DistStoreError:
                        if ownership.words[0] == mine:
                            raise
                    else:
                        if ownership.words[0] == mine:
                            return found
                if not self._forwards:
                    raise StoreMovedError.to(ownership.referral())
                return await self._client(rank).execute(command, key)
            except StoreUnresponsiveError as error:
                client, owner = self._clients[rank], self._owners.named(rank)
                name, remedy = f"the store at {client.url}, of {owner.text},", "Repeat the request to wait longer"
                raise unresponsive_error(name, client.url, command, client.timeout, owner.ranks, remedy) from error
            except DistNetworkError as error:
                if not self._forwards or not (isinstance(error, StoreMovedError) or error.__cause__ is not None):
                    raise
                if command.seconds and len(self._failures) > len(failures):
                    raise failed_wait_error(self._failures[len(failures)], error) from error
                failover = failover or Failover(self._owners, rank)
                pause = failover.failed(error)
            await asyncio.sleep(pause)
            rank = failover.rank
            command = _remaining(command, ends)

    def cancel_waits(self) -> None:
        self._memory.cancel_waits()

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        self._failures = (*self._failures, failure)
        self._memory.fail_waits(failure, for_good=for_good)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    def _client(self, rank: int) -> HttpStore:
        with import_lock:
            from rankmesh_agent.store.http_client import HttpStore  # httpx takes a quarter of a rank's start

        if rank not in self._clients:
            self._clients[rank] = client = HttpStore(self._owners.members[rank].http, self._token, forwarded=True)
            client.timeout = FORWARD_SECONDS
        return self._clients[rank]


def _remaining(command: Command[T], ends: float) -> Command[T]:
    """Return a command that waits no longer than until ``ends``, by time.monotonic."""
    if not isinstance(command, Waiting) or not command.seconds:
        return command
    remaining: Command[T] = command.with_timeout(max(0.0, ends - time.monotonic()))
    return remaining
