"""The keys, values and queues themselves: synchronous, and safe to use from several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from operator import itemgetter
from typing import Any, Generic, TypeVar

from rankmesh_agent.wire.stats import StoreStats

Values = Mapping[str, bytes]
Changes = Mapping[str, bytes | None]
"""New values by key; None removes the key."""

T = TypeVar("T")


class Table:
    """Keys, values, queues, and those who wait for something to appear. No method blocks.

    A queue has a key, too, but is not the key's value: both may be there at a time.
    """

    def __init__(self) -> None:
        # It may be closed while this thread is in the middle of something, because a garbage collection closes stores.
        self._lock = threading.RLock()
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, set[_Watch[Any]]] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._takers: dict[str, deque[Future[bytes]]] = {}
        self._asked: dict[str, int] = {}
        self._closed = False

    # How it is

    def count_call(self, name: str) -> None:
        """Take note that a command of that name is carried out."""
        with self._lock:
            self._asked[name] = self._asked.get(name, 0) + 1

    def vitals(self) -> StoreStats:
        """Return what has been counted."""
        with self._lock:
            return StoreStats(dict(self._asked), len(self._values))

    # Values

    def change(self, plan: Callable[[Values], tuple[T, Changes]], keep: Callable[[Changes], None] | None = None) -> T:
        """Change values in one step that nobody sees half done.

        Args:
            plan: called with all values, which it must leave alone; returns a result, and the changes to make.
            keep: called with the changes before they are made; if it raises, they are not.

        Returns:
            The plan's result.
        """
        with self._lock:
            result, changes = plan(self._values)
            if changes and keep is not None:
                keep(changes)
            if None in changes.values():
                for key, value in changes.items():
                    if value is None:
                        self._values.pop(key, None)
                    else:
                        self._values[key] = value
            else:
                self._values.update(changes)  # type: ignore[arg-type]  # in one step also for value(), without the lock
            complete = self._completed(changes) if self._watches else ()
        for watch in complete:
            watch.finish()
        return result

    def value(self, key: str) -> bytes | None:
        """Return the value of ``key``, None if it has none."""
        return self._values.get(key)  # one look at a dict needs no lock

    def values(self, keys: Collection[str]) -> list[bytes] | None:
        """Return the values of ``keys`` at one moment, None if one of them has none."""
        with self._lock:
            try:
                # A call that gets all at once takes half the time of as many calls; but what it returns depends.
                return [*itemgetter(*keys)(self._values)] if len(keys) > 1 else [self._values[key] for key in keys]
            except KeyError:
                return None

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of values that begin with ``prefix``, sorted."""
        with self._lock:
            found = list(self._values)
        return sorted(key for key in found if key.startswith(prefix))

    def count(self, prefix: str = "") -> int:
        """Return how many keys that begin with ``prefix`` have values."""
        with self._lock:
            return sum(key.startswith(prefix) for key in self._values) if prefix else len(self._values)

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether each of ``keys`` has a value or a queue with something in it."""
        with self._lock:
            return all(key in self._values or key in self._queues for key in keys)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of ``keys`` that have no value."""
        with self._lock:
            return [key for key in keys if key not in self._values]

    def watch(self, keys: Iterable[str], pick: Callable[[Values], T]) -> Future[T]:
        """Return a future that completes when all ``keys`` have values at the same time.

        It completes with what ``pick`` makes of the values at that moment, in the thread that sets the last key. Cancel
        it to stop watching.
        """
        watch = _Watch(tuple(keys), pick)
        with self._lock:
            watch.missing = {key for key in watch.keys if key not in self._values}
            if not watch.missing:
                watch.take(self._values)
            elif not self._closed:
                for key in watch.keys:
                    self._watches.setdefault(key, set()).add(watch)
        if not watch.missing:
            watch.finish()
        elif self._closed:
            watch.future.cancel()
        else:
            watch.future.add_done_callback(lambda _: self._unwatch(watch))
        return watch.future

    # Queues

    def push(self, key: str, value: bytes, *, first: bool = False) -> None:
        """Append ``value`` to the queue, or put it back at its head; whoever has waited longest gets it at once."""
        with self._lock:
            takers = self._takers.get(key) or deque()
            while takers:
                taker = takers.popleft()
                if taker.set_running_or_notify_cancel():  # from here on it cannot be cancelled any more
                    break
            else:
                queue = self._queues.setdefault(key, deque())
                (queue.appendleft if first else queue.append)(value)
                return
        taker.set_result(value)

    def pop_one(self, key: str) -> bytes | None:
        """Return the queue's first value, which has left the queue then; None if it is empty."""
        with self._lock:
            queue = self._queues.get(key)
            if queue is None:
                return None
            value = queue.popleft()
            if not queue:
                del self._queues[key]
            return value

    def pop(self, key: str) -> Future[bytes]:
        """Return a future that completes with the queue's first value, which has left the queue then.

        Cancel it to stop waiting: if that succeeds, no value has left the queue.
        """
        future: Future[bytes] = Future()
        with self._lock:
            value = self.pop_one(key)
            if value is not None:
                future.set_result(value)
            elif not self._closed:
                self._takers.setdefault(key, deque()).append(future)
        if not future.done():
            future.add_done_callback(lambda _: self._leave(key, future))
            if self._closed:
                future.cancel()
        return future

    def length(self, key: str) -> int:
        """Return how many values are in the queue."""
        return len(self._queues.get(key, ()))

    # The end

    def close(self) -> None:
        """Send all away who wait, now and later: their futures are cancelled. Does nothing the second time."""
        with self._lock:
            self._closed = True
            waiting: set[Future[Any]] = {watch.future for watches in self._watches.values() for watch in watches}
            waiting.update(taker for takers in self._takers.values() for taker in takers)
        for future in waiting:
            future.cancel()

    # What needs the lock

    def _completed(self, changes: Changes) -> list[_Watch[Any]]:
        """Return the watches that the changes, all made by now, complete; they are watches no more."""
        touched: dict[_Watch[Any], None] = {}
        for key, value in changes.items():
            for watch in self._watches.get(key, ()):
                if value is None:
                    watch.missing.add(key)
                else:
                    watch.missing.discard(key)
                    touched[watch] = None
        complete = [watch for watch in touched if not watch.missing]
        for watch in complete:
            watch.take(self._values)
            self._forget(watch)
        return complete

    def _forget(self, watch: _Watch[Any]) -> None:
        for key in watch.keys:
            watches = self._watches.get(key, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(key, None)

    # What takes the lock

    def _unwatch(self, watch: _Watch[Any]) -> None:
        with self._lock:
            self._forget(watch)

    def _leave(self, key: str, taker: Future[bytes]) -> None:
        with self._lock:
            takers = self._takers.get(key)
            if takers is not None:
                if taker in takers:
                    takers.remove(taker)
                if not takers:
                    del self._takers[key]


class _Watch(Generic[T]):
    """Somebody who waits until all of some keys have values."""

    def __init__(self, keys: tuple[str, ...], pick: Callable[[Values], T]) -> None:
        self.keys = keys
        self.missing: set[str] = set()
        self.future: Future[T] = Future()
        self._pick = pick
        self._values: Values = {}

    def take(self, values: Values) -> None:
        """Keep what the keys hold now: the future is completed later, outside the lock."""
        self._values = {key: values[key] for key in self.keys}

    def finish(self) -> None:
        """Complete the future; without the lock, because its callbacks may call the table."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self._pick(self._values))
