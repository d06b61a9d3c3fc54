"""What the ranks of a group tell each other through the store before their GPUs meet: identities, ids, handles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError, StoreTimeoutError

_SLICE_SECONDS = 0.2
"""How long the store is waited for at a time: between two waits failures, the deadline and Ctrl-C are noticed."""


class Store(Protocol):
    """What is needed of a store, as torch's are; keys are the group's own."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return a key's value, when it has one."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys have values."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class StoreExchange:
    """One rank's side.

    Args:
        store: for the group's own keys.
        rank: this group rank.
        numbers: returns the numbers the user knows the members by.
        check: raises if some group ranks will not come: the group has failed, or one of them has left.

    Attributes:
        check: see above.
    """

    def __init__(
        self, store: Store, rank: int, numbers: Callable[[], Sequence[int]], check: Callable[[Sequence[int]], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._numbers = numbers
        self.check = check
        self._told: set[str] = set()

    def publish(self, what: str, mine: bytes) -> None:
        """Let the others know something of this rank."""
        key = f"{what}/{self._rank}"
        self._told.add(key)
        self._store.set(key, mine)

    def peek(self, what: str, rank: int) -> bytes | None:
        """Return what a member has told by now, None if nothing."""
        key = f"{what}/{rank}"
        return self._store.get(key) if self._store.check([key]) else None

    def gather(self, what: str, ranks: Sequence[int], deadline: Deadline, why: str) -> list[bytes]:
        """Return what members told, when they all have.

        Args:
            what: as they called it.
            ranks: group ranks.
            deadline: when to give up.
            why: what it is for, for people.

        Raises:
            CollectiveTimeoutError: some did not come; names them.
            DistError: the group failed.
        """
        keys = [f"{what}/{rank}" for rank in ranks]
        while not self._store.check(keys):
            self.check([rank for rank in ranks if self.peek(what, rank) is None])
            if deadline.expired():
                numbers = self._numbers()
                missing = [numbers[rank] for rank in ranks if self.peek(what, rank) is None]
                raise CollectiveTimeoutError(
                    f"{why}: waited {deadline.seconds:.1f} s for {', '.join(f'rank {rank}' for rank in missing)}, "
                    "which did not make a call on arrays on GPUs",
                    ranks=missing,
                )
            with contextlib.suppress(StoreTimeoutError):
                self._store.wait(keys, timedelta(seconds=min(_SLICE_SECONDS, deadline.remaining())))
        return [self._store.get(key) for key in keys]

    def delete_keys(self) -> None:
        """Remove what this rank told; nobody needs it any more."""
        for key in self._told:
            with contextlib.suppress(DistError):
                self._store.delete_key(key)
        self._told.clear()
