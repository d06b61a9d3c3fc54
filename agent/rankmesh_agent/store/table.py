"""The keys, values and queues of a store, and replies to requests that may come again, for several threads."""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from operator import itemgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rankmesh_agent.wire.errors import IdempotencyKeyReusedError, StoreFullError
from rankmesh_agent.wire.store_frames import Frame, RequestId

RETENTION_SECONDS = 330.0
"""Lifetime of a cached reply: longer than the default timeout of a client, which repeats its requests until then."""
MAX_REPLIES = 4096
MAX_REPLY_BYTES = 16 << 20
"""Maximum size of all cached replies together, besides the newest, which is cached whatever its size."""


class ReplyCache:
    """The newest reply under each name of a RequestId: MAX_REPLIES of the last RETENTION_SECONDS. For several threads.

    Large replies are dropped earlier, the oldest first, when all together have more than MAX_REPLY_BYTES. A few of them
    do not displace the small ones, which would not exceed the maximum without them.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[float, int, Frame]] = OrderedDict()  # with their times and numbers
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self, request_id: RequestId) -> Frame | None:
        """Return the reply to a request; None if there is none.

        Raises:
            IdempotencyKeyReusedError: another command has the same Idempotency-Key.
        """
        _, number, reply = self._entries.get(request_id.name, (0.0, request_id.number, None))
        if request_id.keyed and number != request_id.number:
            raise IdempotencyKeyReusedError(
                "the Idempotency-Key belongs to another request; make a new one for each request"
            )
        return reply if number == request_id.number else None

    def add(self, request_id: RequestId, reply: Frame) -> None:
        """Cache the reply to a request, in the place of an earlier one of its name."""
        now = time.monotonic()
        with self._lock:
            self._remove(request_id.name)
            while self._entries:
                oldest, (at, _, _) = next(iter(self._entries.items()))
                if len(self._entries) < MAX_REPLIES and at + RETENTION_SECONDS > now:
                    break
                self._remove(oldest)
            if self._bytes > MAX_REPLY_BYTES:
                for name, (_, _, frame) in list(self._entries.items()):
                    if self._bytes > MAX_REPLY_BYTES and len(frame) > MAX_REPLY_BYTES // MAX_REPLIES:
                        self._remove(name)
            self._entries[request_id.name] = now, request_id.number, reply
            self._bytes += len(reply)

    def _remove(self, name: bytes) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= len(entry[2])


Values = Mapping[str, bytes]
Changes = Mapping[str, bytes | None]
"""New values by key; None removes the key."""

T = TypeVar("T")


class Quota(NamedTuple):
    """Limits of a table, whose settings are RANKMESH_STORE_KEYS and RANKMESH_STORE_BYTES."""

    keys: int
    bytes: int


class StoreStats(NamedTuple):
    """Counts of a table.

    Attributes:
        operations: number of calls, by the call's name.
    """

    operations: dict[str, int]
    keys: int


UNLIMITED = Quota(sys.maxsize, sys.maxsize)


class TableLog(Protocol):
    """Record of a table's changes, of one thread. Each method is called before the change is made, which an error
    prevents.

    Attributes:
        request_id: the request that is executed, whose reply is recorded, too; None for none.
    """

    request_id: RequestId | None

    def changed(self, changes: Changes, result: Any) -> None:
        """Record new values, and the result of the command that sets them."""

    def pushed(self, key: str, value: bytes, *, first: bool) -> None:
        """Record that a value is appended to a queue, or put back at its head, as if it had never been taken."""

    def popped(self, key: str, value: bytes, request_id: RequestId | None) -> None:
        """Record that the first value of a queue is removed, by the request of ``request_id``."""

    def handed_over(self, value: bytes, request_id: RequestId | None) -> None:
        """Record that a value goes to the request of ``request_id``, which waits, and not into the queue."""


class Table:
    """Keys, values, queues, and the futures of callers that wait for them. No method blocks.

    A queue has a key, too, but is not the key's value: both may exist at a time.

    Attributes:
        log: records each change before it is made; None if nothing does.
        replies: those to requests that changed something and may come again.
    """

    def __init__(self, quota: Quota = UNLIMITED) -> None:
        self.log: TableLog | None = None
        self.replies = ReplyCache()
        self._quota = quota
        self._entries, self._bytes = 0, 0
        # Reentrant: a garbage collection closes stores, perhaps in the middle of a call of this thread.
        self._lock = threading.RLock()
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, set[_Watch[Any]]] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._pending_pops: dict[str, OrderedDict[Future[bytes], RequestId | None]] = {}  # with the requests that wait
        self._calls: dict[str, int] = {}
        self._closed = False

    # Statistics

    def count_call(self, name: str) -> None:
        """Count the execution of a command of that name."""
        with self._lock:
            self._calls[name] = self._calls.get(name, 0) + 1

    def stats(self) -> StoreStats:
        """Return the counters."""
        return StoreStats(dict(self._calls), len(self._values))  # copies of dicts need no lock, which a write may hold

    # Values

    def change(self, plan: Callable[[Values], tuple[T, Changes]]) -> T:
        """Change values in one atomic step.

        Args:
            plan: called with all values, which it must not change; returns a result, and the changes to make.

        Returns:
            The plan's result.

        Raises:
            StoreFullError: the changes exceed the quota; none is made.
        """
        with self._lock:
            result, changes = plan(self._values)
            entries, size = self._growth(changes)
            self._check_quota(entries, size)
            if changes and self.log is not None:
                self.log.changed(changes, result)
            if None in changes.values():
                for key, value in changes.items():
                    if value is None:
                        self._values.pop(key, None)
                    else:
                        self._values[key] = value
            else:
                self._values.update(changes)  # type: ignore[arg-type]  # atomic also for value(), which does not lock
            self._entries += entries
            self._bytes += size
            completed = self._complete(changes) if self._watches else ()
        for watch in completed:
            watch.finish()
        return result

    def value(self, key: str) -> bytes | None:
        """Return the value of ``key``, None if it has none."""
        return self._values.get(key)  # a single dict lookup needs no lock

    def values(self, keys: Collection[str]) -> list[bytes] | None:
        """Return the values of ``keys`` at one moment, None if one of them has none."""
        with self._lock:
            try:
                # One itemgetter takes half the time of a lookup for each key, but returns a tuple only for several.
                return [*itemgetter(*keys)(self._values)] if len(keys) > 1 else [self._values[key] for key in keys]
            except KeyError:
                return None

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of values that begin with ``prefix``, sorted."""
        return sorted(key for key in self.names() if key.startswith(prefix))

    def names(self) -> list[str]:
        """Return the keys of all values, in any order."""
        return list(self._values)

    def count(self, prefix: str = "") -> int:
        """Return the number of keys with values that begin with ``prefix``."""
        return sum(key.startswith(prefix) for key in self.names()) if prefix else len(self._values)

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether each of ``keys`` has a value or a queue that is not empty."""
        with self._lock:
            return all(key in self._values or key in self._queues for key in keys)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of ``keys`` that have no value."""
        with self._lock:
            return [key for key in keys if key not in self._values]

    def watch(self, keys: Iterable[str], select: Callable[[Values], T]) -> Future[T]:
        """Return a future that completes when all ``keys`` have values at the same time.

        Its result is ``select`` of the values at that moment; it completes in the thread that sets the last key. Cancel
        it to stop watching.
        """
        watch = _Watch(tuple(keys), select)
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
        """Append ``value`` to the queue, or put it back at its head; the longest-waiting pop gets it at once.

        Raises:
            StoreFullError: it exceeds the quota, and is not put back.
        """
        with self._lock:
            pops = self._pending_pops.get(key) or OrderedDict()
            while pops:
                pop, popped_by = pops.popitem(last=False)
                if pop.set_running_or_notify_cancel():  # it cannot be cancelled any more
                    if self.log is not None:
                        try:
                            self.log.handed_over(value, popped_by)
                        except BaseException as error:
                            pop.set_exception(error)
                            raise
                    break
            else:
                if not first:
                    self._check_quota(1, _size(key, value))
                if self.log is not None:
                    self.log.pushed(key, value, first=first)
                self._entries += 1
                self._bytes += _size(key, value)
                queue = self._queues.setdefault(key, deque())
                (queue.appendleft if first else queue.append)(value)
                return
        pop.set_result(value)

    def pop_one(self, key: str) -> bytes | None:
        """Remove and return the queue's first value; None if it is empty."""
        with self._lock:
            queue = self._queues.get(key)
            if queue is None:
                return None
            if self.log is not None:
                self.log.popped(key, queue[0], self.log.request_id)
            value = queue.popleft()
            self._entries -= 1
            self._bytes -= _size(key, value)
            if not queue:
                del self._queues[key]
            return value

    def pop(self, key: str) -> Future[bytes]:
        """Return a future of the queue's first value, which it removes.

        Cancel it to stop waiting: if that succeeds, no value has left the queue.
        """
        future: Future[bytes] = Future()
        with self._lock:
            waits = None if self.log is None else self.log.request_id
            value = self.pop_one(key)
            if value is not None:
                future.set_result(value)
            elif not self._closed:
                self._pending_pops.setdefault(key, OrderedDict())[future] = waits
        if not future.done():
            future.add_done_callback(lambda _: self._remove_pop(key, future))
            if self._closed:
                future.cancel()
        return future

    def length(self, key: str) -> int:
        """Return the number of values in the queue."""
        return len(self._queues.get(key, ()))

    def contents(self) -> tuple[Values, Mapping[str, Collection[bytes]]]:
        """Return a copy of all values, and one of all queues."""
        with self._lock:
            return dict(self._values), {key: list(queue) for key, queue in self._queues.items()}

    def fill(self, values: Mapping[str, bytes], queues: Mapping[str, Collection[bytes]]) -> None:
        """Add values and queues to an empty table, without limits and records: they are those of an earlier table."""
        with self._lock:
            self._values, self._queues = dict(values), {key: deque(queue) for key, queue in queues.items()}
            pairs = [*values.items(), *((key, value) for key, queue in queues.items() for value in queue)]
            self._entries, self._bytes = len(pairs), sum(_size(key, value) for key, value in pairs)

    def close(self) -> None:
        """Cancel the futures of all waits, now and later. Does nothing the second time."""
        self._closed = True
        with self._lock:
            waiting: set[Future[Any]] = {watch.future for watches in self._watches.values() for watch in watches}
            waiting.update(pop for pops in self._pending_pops.values() for pop in pops)
        for future in waiting:
            future.cancel()

    # These need the lock

    def _growth(self, changes: Changes) -> tuple[int, int]:
        """Return how many entries and bytes changes add; negative if they remove more."""
        entries, size = 0, 0
        for key, value in changes.items():
            before = self._values.get(key)
            if before is not None:
                entries -= 1
                size -= _size(key, before)
            if value is not None:
                entries += 1
                size += _size(key, value)
        return entries, size

    def _check_quota(self, entries: int, size: int) -> None:
        """Raise StoreFullError if so many more entries or bytes exceed the quota."""
        for more, now, most, what, setting in (
            (entries, self._entries, self._quota.keys, "keys and queued values", "RANKMESH_STORE_KEYS"),
            (size, self._bytes, self._quota.bytes, "bytes", "RANKMESH_STORE_BYTES"),
        ):
            if more > 0 and now + more > most:
                raise StoreFullError(
                    f"the store has {now} {what}, and {more} more would exceed its limit of {most}: delete keys, or "
                    f"raise {setting} in the process that holds the store"
                )

    def _complete(self, changes: Changes) -> list[_Watch[Any]]:
        """Remove and return the watches that are complete now that all ``changes`` are made."""
        touched: dict[_Watch[Any], None] = {}
        for key, value in changes.items():
            for watch in self._watches.get(key, ()):
                if value is None:
                    watch.missing.add(key)
                else:
                    watch.missing.discard(key)
                    touched[watch] = None
        completed = [watch for watch in touched if not watch.missing]
        for watch in completed:
            watch.take(self._values)
            self._remove_watch(watch)
        return completed

    def _remove_watch(self, watch: _Watch[Any]) -> None:
        for key in watch.keys:
            watches = self._watches.get(key, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(key, None)

    # These take the lock

    def _unwatch(self, watch: _Watch[Any]) -> None:
        with self._lock:
            self._remove_watch(watch)

    def _remove_pop(self, key: str, pop: Future[bytes]) -> None:
        with self._lock:
            pops = self._pending_pops.get(key)
            if pops is not None:
                pops.pop(pop, None)
                if not pops:
                    del self._pending_pops[key]


def _size(key: str, value: bytes) -> int:
    """Return the bytes of a key and its value."""
    return len(value) + (len(key) if key.isascii() else len(key.encode()))


class _Watch(Generic[T]):
    """A wait until all of some keys have values."""

    def __init__(self, keys: tuple[str, ...], select: Callable[[Values], T]) -> None:
        self.keys = keys
        self.missing: set[str] = set()
        self.future: Future[T] = Future()
        self._select = select
        self._values: Values = {}

    def take(self, values: Values) -> None:
        """Copy the values of the keys at this moment: the future is completed later, outside the lock."""
        self._values = {key: values[key] for key in self.keys}

    def finish(self) -> None:
        """Complete the future; without the lock, because its callbacks may use the table."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self._select(self._values))
