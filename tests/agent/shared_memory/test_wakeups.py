"""Wakeups of a step in shared memory, in all interleavings of a rank that posts and ranks that wait.

The code of ``Slots`` itself runs, one access to shared memory at a time: a program is called from its beginning with
the values that it has read so far, and stopped at the next access. Stores go through the store buffer of an x86 core.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from rankmesh_agent.shared_memory import slots
from rankmesh_agent.shared_memory.slots import Slots

COUNT, SLEEPERS = 0, slots._SLEEPERS
ASLEEP, WOKEN = "asleep", "woken"


class Program(NamedTuple):
    """A thread: what it has read, its store buffer, and whether it sleeps or was woken in a sleep."""

    reads: tuple[int, ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    sleep: str = ""


State = tuple[tuple[Program, ...], tuple[int, int]]
"""The programs, and count and sleepers flag in memory."""


class _Access(Exception):
    """The next access of a program."""


class _Replay:
    """Shared memory, fence and futex of a program that is called again with the values that it has read."""

    def __init__(self, reads: tuple[int, ...]) -> None:
        self.reads = list(reads)

    def _do(self, *access: Any) -> int:
        if not self.reads:
            raise _Access(*access)
        return self.reads.pop(0)

    def __getitem__(self, word: int) -> int:
        return self._do("load", word)

    def __setitem__(self, word: int, value: int) -> None:
        self._do("store", word, value)

    def __enter__(self) -> None:
        self._do("fence")

    def __exit__(self, *error: object) -> None: ...

    def wake(self, address: int) -> None:
        self._do("wake")

    def sleep(self, address: int, count: int, timeout: object) -> None:
        self._do("sleep", count)


def post(rank: Slots) -> None:
    """Post two steps; wait for no rank."""
    rank.step(())
    rank.step(())


def wait(rank: Slots) -> None:
    """Wait for both steps of rank 0."""
    rank._wait(0, 0, 1)
    rank._wait(0, 0, 2)


def next_access(program: Callable[[Slots], None], reads: tuple[int, ...], monkeypatch) -> tuple[Any, ...] | None:
    """Return the access of a program after those that have returned ``reads``; None at its end."""
    memory = _Replay(reads)
    monkeypatch.setattr(slots, "_fence", memory)
    monkeypatch.setattr(slots, "futex_wake", memory.wake)
    monkeypatch.setattr(slots, "futex_wait", memory.sleep)
    rank = Slots.__new__(Slots)
    vars(rank).update(
        _steps=0, _words=memory, _own_line=0, _address=0, _addresses=[0], _others=[], _slice=None, _compared=True
    )
    rank._check = lambda missing: None
    try:
        program(rank)
    except _Access as access:
        return access.args
    return None


def successors(state: State, accesses: list[tuple[Any, ...] | None]) -> list[State]:
    """Return the states after one more access of one program, or after a store buffer has written to memory."""
    programs, (count, sleepers) = state
    found: list[State] = []

    def put(number: int, program: Program, memory: tuple[int, int] = (count, sleepers), wake: bool = False) -> None:
        others = [each._replace(sleep=WOKEN) if wake and each.sleep else each for each in programs]
        others[number] = program
        found.append((tuple(others), memory))

    for number, (program, access) in enumerate(zip(programs, accesses, strict=True)):
        reads, stores, sleep = program
        if stores:
            word, value = stores[0]
            put(
                number,
                program._replace(stores=stores[1:]),
                (value, sleepers) if word == COUNT else (count, value),
            )
        match access:
            case "load", word:
                buffered = [value for stored, value in stores if stored == word]
                seen = buffered[-1] if buffered else count if word == COUNT else sleepers
                put(number, Program((*reads, seen), stores))
            case "store", word, value:
                put(number, Program((*reads, 0), (*stores, (word, value))))
            case ("fence",) if not stores:
                put(number, Program((*reads, 0)))
            case ("wake",) if not stores:
                put(number, Program((*reads, 0)), wake=True)
            case "sleep", expected if not stores:
                if sleep == WOKEN or (not sleep and count != expected):
                    put(number, Program((*reads, 0)))
                elif not sleep:
                    put(number, program._replace(sleep=ASLEEP))
    return found


@pytest.mark.parametrize("waiting", [1, 2])
def test_no_rank_sleeps_after_the_last_post(monkeypatch, waiting):
    """A wakeup that is lost would last until the slice of the sleep ends, 50 ms."""
    monkeypatch.setattr(slots, "core_contention", SimpleNamespace(should_spin=lambda: False))
    programs = [post, *[wait] * waiting]
    start: State = (tuple(Program() for _ in programs), (0, 0))
    todo, seen = [start], {start}
    known: dict[tuple[Callable[[Slots], None], tuple[int, ...]], tuple[Any, ...] | None] = {}
    while todo:
        state = todo.pop()
        accesses = []
        for program, (reads, _, _) in zip(programs, state[0], strict=True):
            if (program, reads) not in known:
                known[program, reads] = next_access(program, reads, monkeypatch)
            accesses.append(known[program, reads])
        after = successors(state, accesses)
        assert after or not any(accesses), f"a rank sleeps, and no rank will wake it: {state}"
        new = set(after) - seen
        seen |= new
        todo += new
    assert len(seen) > 100
