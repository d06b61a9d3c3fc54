"""A model of a store, and a state machine that drives any store beside it: random calls, and waiters in threads."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import rankmesh as dist
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store import store as store_base
from rankmesh_agent.store.table import Table

LONG, SHORT = timedelta(seconds=30), timedelta(milliseconds=4)
KEYS = ("a", "..", "grüße/\0\n?#%2F")
VALUES = [b"", b"1", b"41", b"-7", b"+3", b"0041", b"x", b"1.5", b" 1", b"1_0", "\u0661".encode(), b"9" * 20, b"\0\xff"]
_EDGE = 1 << 63
_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")

Waiter = tuple[str, tuple[str, ...], "Future[Any]"]


class Model:
    """What a store has to do. A call returns its result, raises the error expected, or raises Blocked."""

    class Blocked(Exception):
        """The call waits."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: defaultdict[str, deque[bytes]] = defaultdict(deque)

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        value = self.values.get(key) or b"0"
        if not _NUMBER.fullmatch(value) or not -_EDGE <= int(value) + amount < _EDGE:
            raise dist.errors.NotANumberError("")
        self.values[key] = b"%d" % (int(value) + amount)
        return int(self.values[key])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values.get(key, expected)

    def append(self, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self.values.update(zip(keys, values, strict=True))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values or self.queues[key] for key in keys)

    def list_keys(self) -> list[str]:
        return sorted(self.values)

    def queue_push(self, key: str, value: bytes) -> None:
        self.queues[key].append(value)

    def queue_len(self, key: str) -> int:
        return len(self.queues[key])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not self.values.keys() >= set(keys):
            raise self.Blocked
        return [self.values[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: Sequence[str]) -> None:
        self.multi_get(keys)

    def queue_pop(self, key: str) -> bytes:
        if not self.queues[key]:
            raise self.Blocked
        return self.queues[key].popleft()


class Subject:
    """Stores with the same keys, for the machine to drive.

    Args:
        stores: the stores; each call goes to any of them.
        tables: the tables in which their waits are registered.
        hidden: number of keys that num_keys counts and list_keys does not return.
        unsupported: names of the methods that raise UnsupportedStoreError.
    """

    def __init__(
        self, stores: Sequence[Any], tables: Iterable[Table], *, hidden: int = 0, unsupported: Iterable[str] = ()
    ) -> None:
        self.stores, self.tables = list(stores), list(tables)
        self.hidden, self.unsupported = hidden, frozenset(unsupported)
        for store in self.stores:
            store.set_timeout(LONG)

    def waits(self, expected: int) -> int:
        """Return the number of waits that are registered, as soon as it is the expected one or after a while."""
        deadline = Deadline(10.0)
        while True:
            count = self.registered()
            if count == expected or deadline.expired():
                return count
            time.sleep(0.0005)

    def registered(self) -> int:
        """Return the number of waits that are registered."""
        count = 0
        for table in self.tables:
            with table._lock:
                count += len(set().union(*table._watches.values())) + sum(map(len, table._pending_pops.values()))
        return count

    def clear(self) -> None:
        """Remove all values and queues."""
        for table in self.tables:
            table._values.clear()
            table._queues.clear()


def check_that_waiters_see_whole_changes(subject: Subject) -> None:
    """Check that a multi_set completes a multi_get with all of its values, whichever key comes first."""
    for keys in (KEYS[:2], KEYS[1::-1]):
        subject.stores[0].set(keys[1], "old")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(subject.stores[-1].multi_get, list(keys))
            assert subject.waits(1) == 1
            subject.stores[0].multi_set(keys, ["new", "new"])
            assert waiting.result(10) == [b"new", b"new"]
        subject.clear()


def drive(make: Callable[[], Subject], *, examples: int = 40, steps: int = 50) -> None:
    """Run the machine, each time on a new subject without keys."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.subject, self.model = make(), Model()
            self.threads = ThreadPoolExecutor(8)
            self.waiters: list[Waiter] = []

        def call(self, number: int, name: str, *arguments: Any) -> None:
            """Make a call of the store and of the model, and compare; then settle the waiters."""
            store = self.store(number)
            if name in self.subject.unsupported:
                with pytest.raises(dist.errors.UnsupportedStoreError, match=rf"\w+Store has no {name}\(\)"):
                    getattr(store, name)(*arguments)
                return
            try:
                expected = getattr(self.model, name)(*plain(arguments))
            except dist.errors.NotANumberError:
                with pytest.raises(dist.errors.NotANumberError):
                    getattr(store, name)(*arguments)
            except Model.Blocked:
                self.block(store, name, *arguments, in_vain=number >= 14)
            else:
                found = getattr(store, name)(*arguments)
                assert (found, type(found)) == (expected, type(expected)), name
            self.settle()

        def store(self, number: int) -> Any:
            return self.subject.stores[number % len(self.subject.stores)]

        def block(self, store: Any, name: str, keys: Any, *, in_vain: bool) -> None:
            several = (keys,) if isinstance(keys, str) else tuple(keys)
            if not in_vain and len(self.waiters) < 6:
                self.waiters.append((name, several, self.threads.submit(getattr(store, name), keys)))
                return
            store.set_timeout(SHORT)
            with pytest.raises(dist.errors.StoreTimeoutError, match=r"waited 0\.004 s") as caught:
                getattr(store, name)(keys)
            store.set_timeout(LONG)
            missing = several if name == "queue_pop" else [key for key in several if key not in self.model.values]
            assert all(repr(key)[1:] in str(caught.value) for key in missing)  # behind a prefix, perhaps

        def settle(self) -> None:
            """Check that the waiters that can end do, with the values of this moment, and the others wait."""
            left = []
            for name, keys, future in self.waiters:
                try:
                    single = name in ("get", "queue_pop")
                    expected = getattr(self.model, name)(keys[0] if single else keys)
                except Model.Blocked:
                    left.append((name, keys, future))
                else:
                    assert future.result(10) == expected, (name, keys)
            self.waiters = left
            assert self.subject.waits(len(left)) == len(left)
            assert not any(future.done() for _, _, future in left)

        @rule(number=numbers, key=keys, amount=st.sampled_from([1, -1, 0, 7, _EDGE - 1, -_EDGE, 2 * _EDGE]))
        def add(self, number, key, amount):
            self.call(number, "add", key, amount)

        @rule(number=numbers, key=keys, expected=given, desired=given, there=st.booleans())
        def compare_set(self, number, key, expected, desired, there):
            expected = self.model.values.get(key, b"") if there else expected
            self.call(number, "compare_set", key, expected, desired)

        @rule(number=numbers, name=st.sampled_from(["set", "set", "append", "queue_push"]), key=keys, value=given)
        def set_append_or_push(self, number, name, key, value):
            self.call(number, name, key, value)

        @rule(number=numbers)
        def delete_all(self, number):
            for key in KEYS:
                self.call(number, "delete_key", key)

        @rule(number=numbers, pairs=st.lists(st.tuples(keys, given), max_size=4))
        def multi_set(self, number, pairs):
            self.call(number, "multi_set", [key for key, _ in pairs], [value for _, value in pairs])

        @rule(number=numbers, name=st.sampled_from(["check", "check", "wait", "multi_get"]), several=lists)
        def several_keys(self, number, name, several):
            self.call(number, name, several)

        @rule(number=numbers, name=st.sampled_from(["wait", "multi_get", "multi_get"]), several=st.permutations(KEYS))
        def wait_for_all_but_one(self, number, name, several):
            self.call(number, name, several[1:])

        @precondition(lambda self: self.waiters)
        @rule(number=numbers, name=st.sampled_from(["set", "set", "delete_key"]), value=given)
        def change_a_key_that_is_waited_for(self, number, name, value):
            several = [key for _, keys, _ in self.waiters for key in keys]
            self.call(number, name, several[number % len(several)], *([value] if name == "set" else []))

        @precondition(lambda self: self.waiters)
        @rule(number=numbers, values=st.lists(given, min_size=3, max_size=3), step=st.sampled_from([1, -1]))
        def set_all_keys_that_are_waited_for(self, number, values, step):
            several = list(dict.fromkeys(self.waiters[number % len(self.waiters)][1]))[::step]
            self.call(number, "multi_set", several, values[: len(several)])

        @rule(number=numbers, name=st.sampled_from(["get", "get", "queue_pop", "queue_len", "delete_key"]), key=keys)
        def one_key(self, number, name, key):
            self.call(number, name, key)

        @rule(number=numbers)
        def keys_are_listed_and_counted(self, number):
            self.call(number, "list_keys")
            assert self.store(number).num_keys() == len(self.model.values) + self.subject.hidden

        @precondition(lambda self: not {"queue_pop"} & self.subject.unsupported)
        @rule(number=numbers, key=keys)
        def pop_without_waiting(self, number, key):
            store = self.store(number)
            if self.model.queues[key]:
                assert store.queue_pop(key, block=False) == self.model.queue_pop(key)
            else:
                with pytest.raises(dist.QueueEmptyError, match=re.escape(repr(key)[1:])):
                    store.queue_pop(key, False)

        def teardown(self) -> None:
            try:
                self.call(0, "multi_set", KEYS, [b""] * len(KEYS))
                for _, keys, _ in tuple(self.waiters):
                    self.call(0, "queue_push", keys[0], b"")
                assert not self.waiters
            finally:
                for future in [future for _, _, future in self.waiters]:
                    future.cancel()
                self.threads.shutdown(wait=not self.waiters)
                self.subject.clear()

    check_that_waiters_see_whole_changes(make())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_base, "MARGIN_SECONDS", 30.0)  # a busy machine's servers may answer later, too
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def plain(value: Any) -> Any:
    """Return arguments with their values as bytes."""
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


numbers = st.integers(0, 15)
keys = st.sampled_from(KEYS)
lists = st.lists(keys, max_size=4)
given = st.builds(
    lambda value, kind: kind(value), st.sampled_from(VALUES), st.sampled_from([bytes, bytearray, memoryview])
)
