"""Stores whose methods are commands to a table of keys and values, here or elsewhere."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from rankmesh._stores.base import Store, Text, key_of, keys_of, pairs_of, timedelta_of, value_of
from rankmesh_agent.store import commands
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.wire.errors import DistStoreError, KeyNotFoundError, QueueEmptyError, StoreTimeoutError

T = TypeVar("T")


class CommandStore(Store):
    """A store that hands commands on.

    Args:
        place: where they are carried out. It is closed with the store, when nobody has the store any more, or at exit.
        timeout: how long calls wait unless they are told otherwise.
    """

    def __init__(self, place: BlockingStore, timeout: timedelta) -> None:
        self._timeout = timeout
        self._place: BlockingStore = place
        self._finalizer = weakref.finalize(self, place.close)
        _stores.add(self)

    def close(self) -> None:
        """Let go of connections, files and what is served; calls after that fail. Does nothing the second time."""
        self._finalizer()
        self._place = Refusing(f"{self!r} is closed; make a new one")

    def set(self, key: str, value: Text) -> None:
        self._execute(commands.Set(key_of(key), value_of(value)))

    def get(self, key: str) -> bytes:
        return self._in_time(commands.Get(key_of(key), self._seconds()))

    def add(self, key: str, amount: int) -> int:
        return self._execute(commands.Add(key_of(key), operator.index(amount)))

    def compare_set(self, key: str, expected_value: Text, desired_value: Text) -> bytes:
        return self._execute(commands.CompareSet(key_of(key), value_of(expected_value), value_of(desired_value)))

    def append(self, key: str, value: Text) -> None:
        self._execute(commands.Append(key_of(key), value_of(value)))

    def delete_key(self, key: str) -> bool:
        return self._execute(commands.Delete(key_of(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._in_time(commands.Wait(keys_of(keys), self._seconds(timeout)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._execute(commands.Check(keys_of(keys)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._in_time(commands.MultiGet(keys_of(keys), self._seconds()))

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        self._execute(commands.MultiSet(tuple(pairs_of(keys, values))))

    def num_keys(self) -> int:
        return self._execute(commands.Count())

    def list_keys(self) -> list[str]:
        return self._execute(commands.Keys())

    def queue_push(self, key: str, value: Text) -> None:
        self._execute(commands.QueuePush(key_of(key), value_of(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not block:
            return self._execute(commands.QueuePop(key_of(key)))
        return self._in_time(commands.QueuePop(key_of(key), self._seconds()))

    def queue_len(self, key: str) -> int:
        return self._execute(commands.QueueLen(key_of(key)))

    def has_extended_api(self) -> bool:
        return True

    def _execute(self, command: Command[T]) -> T:
        return self._place.execute(command)

    def _in_time(self, command: Waiting[T]) -> T:
        try:
            return self._execute(command)
        except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
            raise StoreTimeoutError(f"{self!r}: waited {command.seconds:g} s, but {error.message}") from None

    def _seconds(self, timeout: timedelta | float | None = None) -> float:
        return (self.timeout if timeout is None else timedelta_of(timeout)).total_seconds()

    def _after_fork(self) -> None:
        """In a forked child: what the parent's store holds is the parent's to close."""
        self._finalizer.detach()
        self._place.close_in_child()

    def _move(self, place: BlockingStore) -> None:
        """In a forked child: have commands carried out elsewhere."""
        self._place = place
        self._finalizer = weakref.finalize(self, place.close)


class Refusing(BlockingStore):
    """The place of a store that cannot be used any more.

    Args:
        why: what calls raise.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def execute(self, command: Command[T]) -> T:
        raise DistStoreError(self._why)

    def close(self) -> None:
        """Nothing to let go of."""


_stores: weakref.WeakSet[CommandStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
