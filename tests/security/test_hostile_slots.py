"""A hostile rank in a group's shared memory: no value there leads the compiled core out of it, or makes it wait."""

from __future__ import annotations

from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from support.hostile import BATCH, WORDS, fuzzed, seeds
from support.native_group import GUARD, PLAIN, Group

from rankmesh_agent import native
from rankmesh_agent.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from rankmesh_agent.wire.ops import OpType, ReduceOp

pytestmark = pytest.mark.skipif(native.core is None, reason=f"the compiled core does not run: {native.reason}")

ALGORITHMS = {
    OpType.BARRIER: barrier.over_segment,
    OpType.ALL_REDUCE: all_reduce.small_segment,
    OpType.BROADCAST: broadcast.over_segment,
    OpType.ALL_GATHER: all_gather.over_segment,
    OpType.REDUCE: reduce.small_segment,
    OpType.GATHER: gather.over_segment,
    OpType.SCATTER: scatter.over_segment,
    OpType.REDUCE_SCATTER: reduce_scatter.over_segment,
    OpType.ALL_TO_ALL: all_to_all.over_segment,
}
REDUCING = (OpType.ALL_REDUCE, OpType.REDUCE, OpType.REDUCE_SCATTER)
ROOTED = (OpType.BROADCAST, OpType.REDUCE, OpType.GATHER, OpType.SCATTER)
DTYPES = [np.dtype(each) for each in (np.float32, np.float64, np.int64, np.float16, ml_dtypes.bfloat16, np.int8)]
COUNTS = (0, 1, 7, 500, 2049, 8000)
ROOM = GUARD
"""Bytes before and behind each array, which nothing may overwrite."""


class Arrays:
    """Arrays between guards."""

    def __init__(self) -> None:
        self._guarded: list[Any] = []

    def new(self, dtype: np.dtype[Any], count: int) -> Any:
        memory = np.full(2 * ROOM + count * dtype.itemsize, 0xA5, np.uint8)
        self._guarded += [memory[:ROOM], memory[memory.size - ROOM :]]
        return memory[ROOM : memory.size - ROOM].view(dtype)

    def check(self) -> None:
        assert all((guard == 0xA5).all() for guard in self._guarded)


def spoil(group: Group, random: Random) -> None:
    """Set words of the memory: mostly in the lines and notes, rarely the count, for which a call waits."""
    words = group.memory[: group.memory.size - GUARD].view(np.uint64)
    while random.random() < 0.7:
        at = random.randrange(random.choice((16, 64, words.size)))
        if at != 8 or random.random() < 0.01:
            words[at] = (random.choice(WORDS) + random.randint(-2, 2)) % (1 << 64)


def call(group: Group, random: Random) -> None:
    """Make a call, after some words of it have been spoiled."""
    kind, dtype, count, arrays = random.choice([*ALGORITHMS]), random.choice(DTYPES), random.choice(COUNTS), Arrays()
    op = random.choice([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT]) if kind in REDUCING else None
    root = random.randrange(2) if kind in ROOTED else None
    key = (kind, dtype, -1 if kind is OpType.ALL_TO_ALL else count, op, root) if kind is not OpType.BARRIER else (kind,)
    one = [arrays.new(dtype, count)]
    several = [arrays.new(dtype, count) for _ in range(2)]
    arguments: tuple[Any, ...] = {
        OpType.BARRIER: (),
        OpType.ALL_GATHER: (several, *one),
        OpType.GATHER: (several if root == 0 else None, *one),
        OpType.SCATTER: (*one, several if root == 0 else None),
        OpType.REDUCE_SCATTER: (*one, several),
        OpType.ALL_TO_ALL: (several, [arrays.new(dtype, count) for _ in range(2)]),
    }.get(kind, (*one, op))
    if group.plan(key, ALGORITHMS[kind]):
        spoil(group, random)
        steps = group.segment._steps
        group.calls.submit(key, arguments, PLAIN)
        assert group.left or group.segment._steps in (steps, steps + 1)
    assert not group.turn.locked()
    assert group.state.started_at is None
    arrays.check()


def test_no_word_leads_out_of_the_slots() -> None:
    done = 0

    @fuzzed
    @given(seeds)
    def run(seed: int) -> None:
        nonlocal done
        random = Random(seed)
        for _ in range(BATCH):
            group = Group()
            for _ in range(random.randint(1, 12)):
                call(group, random)
            assert (group.memory[-GUARD:] == 0xA5).all()
            done += len(group.state.recorder.latest.copy())

    run()
    assert done > 100, "the core has carried out calls"
