"""The keys and values themselves: synchronous, and safe to use from several threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future

from rankmesh_agent.store.keys import check_key, check_keys
from rankmesh_agent.wire.errors import NotANumberError

Values = dict[str, bytes]

_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Table:
    """Keys, values, and those who watch for keys to appear. No method blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Values = {}
        self._watches: dict[str, set[_Watch]] = {}

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, None if it is not set."""
        check_key(key)
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``."""
        check_key(key)
        with self._lock:
            complete = self._put(key, value)
        _finish(complete)

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number under ``key`` (0 if it is not set), and return the sum.

        Raises:
            NotANumberError: the value is not decimal digits, or the sum would not fit into 64 bits.
        """
        check_key(key)
        with self._lock:
            total = _number(key, self._values.get(key, b"0")) + amount
            if not _LEAST <= total <= _MOST:
                raise NotANumberError(f"the sum for key {key!r} does not fit into 64 bits")
            complete = self._put(key, b"%d" % total)
        _finish(complete)
        return total

    def delete(self, key: str) -> bool:
        """Remove ``key``; return whether it was there."""
        check_key(key)
        with self._lock:
            for watch in self._watches.get(key, ()):
                watch.missing.add(key)
            return self._values.pop(key, None) is not None

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""
        with self._lock:
            found = list(self._values)
        return sorted(key for key in found if key.startswith(prefix))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of ``keys`` that are not set."""
        with self._lock:
            return [key for key in keys if key not in self._values]

    def watch(self, keys: Iterable[str]) -> Future[Values]:
        """Return a future that completes when all ``keys`` are set, with their values at that moment.

        It completes in the thread that sets the last key. Cancel it to stop watching.
        """
        watch = _Watch(check_keys(keys))
        with self._lock:
            watch.missing = {key for key in watch.keys if key not in self._values}
            if watch.missing:
                for key in watch.keys:
                    self._watches.setdefault(key, set()).add(watch)
            else:
                watch.take(self._values)
        if watch.missing:
            watch.future.add_done_callback(lambda _: self._unwatch(watch))
        else:
            _finish([watch])
        return watch.future

    def _put(self, key: str, value: bytes) -> list[_Watch]:
        """Store, and return the watches that are complete now, which are watches no more."""
        self._values[key] = value
        complete = []
        for watch in tuple(self._watches.get(key, ())):
            watch.missing.discard(key)
            if not watch.missing:
                watch.take(self._values)
                self._forget(watch)
                complete.append(watch)
        return complete

    def _unwatch(self, watch: _Watch) -> None:
        with self._lock:
            self._forget(watch)

    def _forget(self, watch: _Watch) -> None:
        for key in watch.keys:
            watches = self._watches.get(key, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(key, None)


class _Watch:
    """Somebody who waits until all of some keys are set."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.missing: set[str] = set()
        self.values: Values = {}
        self.future: Future[Values] = Future()

    def take(self, values: Values) -> None:
        """Keep what the keys hold now: the future is completed later, outside the lock."""
        self.values = {key: values[key] for key in self.keys}


def _finish(watches: list[_Watch]) -> None:
    """Complete the futures; without the lock, because their callbacks may call the table."""
    for watch in watches:
        if watch.future.set_running_or_notify_cancel():
            watch.future.set_result(watch.values)


def _number(key: str, value: bytes) -> int:
    if not _NUMBER.fullmatch(value):
        raise NotANumberError(f"key {key!r} holds {value[:32]!r}, which is not a number in decimal digits")
    return int(value)
