"""Exchange of small values between a group's ranks through the store: GPU identities, NCCL ids, CUDA IPC handles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError, StoreTimeoutError

_POLL_SECONDS = 0.2
"""Longest single wait on the store; failures, the deadline and Ctrl-C are checked in between."""


class Store(Protocol):
    """The part of torch's store interface that the exchange uses; keys are prefixed for the group."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return a key's value; waits until the key exists."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist."""

    def delete_key(self, key: str) -> bool:
        """Delete a key."""


class StoreExchange:
    """One rank's side of the exchange.

    Args:
        store: the store, prefixed for the group.
        rank: this group rank.
        global_ranks: returns the members' global ranks, by group rank.
        check: raises if some of the group ranks cannot take part: the group has failed, or a rank has left.

    Attributes:
        check: see above.
    """

    def __init__(
        self, store: Store, rank: int, global_ranks: Callable[[], Sequence[int]], check: Callable[[Sequence[int]], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._global_ranks = global_ranks
        self.check = check
        self._published: set[str] = set()

    def publish(self, name: str, value: bytes) -> None:
        """Publish this rank's value under a name."""
        key = f"{name}/{self._rank}"
        self._published.add(key)
        self._store.set(key, value)

    def peek(self, name: str, rank: int) -> bytes | None:
        """Return the value that a member has published so far, None if there is none."""
        key = f"{name}/{rank}"
        return self._store.get(key) if self._store.check([key]) else None

    def gather(self, name: str, ranks: Sequence[int], deadline: Deadline, purpose: str) -> list[bytes]:
        """Wait until all of some members have published a value under a name; return the values.

        Args:
            name: as in ``publish``.
            ranks: group ranks.
            deadline: of the wait.
            purpose: of the exchange, for error messages.

        Raises:
            CollectiveTimeoutError: some members did not publish; names them.
            DistError: the group failed.
        """
        keys = [f"{name}/{rank}" for rank in ranks]
        while not self._store.check(keys):
            self.check([rank for rank in ranks if self.peek(name, rank) is None])
            if deadline.expired():
                global_ranks = self._global_ranks()
                missing = [global_ranks[rank] for rank in ranks if self.peek(name, rank) is None]
                raise CollectiveTimeoutError(
                    f"{purpose}: waited {deadline.seconds:.1f} s for {', '.join(f'rank {rank}' for rank in missing)}, "
                    "which did not make a call on arrays on GPUs",
                    ranks=missing,
                )
            with contextlib.suppress(StoreTimeoutError):
                self._store.wait(keys, timedelta(seconds=min(_POLL_SECONDS, deadline.remaining())))
        return [self._store.get(key) for key in keys]

    def delete_keys(self) -> None:
        """Delete the keys that this rank has published."""
        for key in self._published:
            with contextlib.suppress(DistError):
                self._store.delete_key(key)
        self._published.clear()
