"""Random programs of short and long calls, the same for a seed: what a rank has in its arrays afterwards, as digests.

Two ways of carrying out the same calls give the same digests at each rank, or one of them is wrong.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import rankmesh as dist

CALLS = 60
"""Calls of a program."""
Arrays = list[npt.NDArray[Any]]
_TYPES: tuple[Any, ...] = (
    "f4",
    "f4",
    "f8",
    "f8",
    "f2",
    ml_dtypes.bfloat16,
    "i4",
    "i8",
    "u1",
    "i1",
    "i2",
    "u4",
    "c8",
    "?",
)
_DTYPES: tuple[np.dtype[Any], ...] = tuple(map(np.dtype, _TYPES))
_COUNTS = (0, 1, 1, 2, 3, 7, 16, 33, 100, 1000, 4096, 16384, 20000, 70000, 200000)
_ORDERED = ("SUM", "PRODUCT", "MIN", "MAX")
_ARITHMETIC = ("SUM", "PRODUCT")
_BITWISE = ("BAND", "BOR", "BXOR")
_ASYNC = 0.2
"""Share of asynchronous calls."""
_MISMATCHES = 0.02
"""Share of calls that one rank makes differently."""


_ORDERS = ("as sent", "sorted", "posted", "begun", "any", "answered", "batch", "itself")
"""What makes a program's short messages different: see _short_messages."""


class Program:
    """One rank's run of a program in one of several groups a call.

    Args:
        seed: of the program, the same at all ranks.
        groups: the groups that this rank is in, and None for the others, by number; the same groups at all ranks.
    """

    def __init__(self, seed: int, groups: list[tuple[Any, list[int]]]) -> None:
        self.draw = random.Random(seed)
        self._seed = seed
        self._groups = groups
        self._digest = hashlib.blake2b(digest_size=8)
        self.pending: list[tuple[Any, Arrays]] = []
        self._step = 0

    def run(self) -> str:
        """Make all calls; return the digest of this rank's results."""
        kinds = (_all_reduce, _reduce, _broadcast, _all_gather, _all_gather_into, _gather, _scatter, _reduce_scatter)
        for self._step in range(CALLS):
            others = _all_to_all, _all_to_all, _barrier, _messages, _messages
            kind = self.draw.choice((*kinds, *kinds, *others, *[_short_messages] * 12))
            self.group, self.ranks = self.draw.choice(self._groups)
            self.dtype = self.draw.choice(_DTYPES)
            self.count = self.draw.choice(_COUNTS)
            self.op = getattr(dist.ReduceOp, self.draw.choice(_ops_of(self.dtype)))
            self.root = self.draw.choice(self.ranks)
            self.step = self.draw.choice((1, 1, 1, 2))
            self.offset = self.draw.choice((0, 0, 0, 1))
            self.messages = self.draw.randint(1, 3)
            self.tags = self.draw.choices((0, 1, -5, 1 << 40), k=self.draw.randint(1, 5))
            self.order = self.draw.choice(_ORDERS)
            self.asynchronous = self.draw.random() < _ASYNC and kind not in (_messages, _short_messages)
            differs = self.draw.choice(self.ranks) if self.draw.random() < _MISMATCHES else None
            if dist.get_rank() not in self.ranks:
                continue
            if differs is not None and len(self.ranks) > 1:
                self._mismatch(differs)
            else:
                kind(self)
            if not self.asynchronous:
                self.finish()
        self.finish()
        return self._digest.hexdigest()

    def array(self, count: int, lane: int = 0) -> npt.NDArray[Any]:
        """Return this rank's values, in memory that may be neither contiguous nor aligned to more than an element."""
        values = np.random.default_rng((self._seed, self._step, dist.get_rank(), lane))
        if self.dtype.kind in "iub":
            limits = (0, 2) if self.dtype.kind == "b" else (-9, 10) if self.dtype.kind == "i" else (0, 10)
            drawn = values.integers(*limits, count)
        else:
            drawn = values.standard_normal(count) * 2.0 ** values.integers(-3, 4, count)
        memory = np.zeros(self.offset + count * self.step, self.dtype)
        array = memory[self.offset :: self.step][:count]
        array[...] = drawn.astype(self.dtype)
        return array

    def call(
        self, function: Callable[..., Any], *arguments: Any, results: list[npt.NDArray[Any]], **named: Any
    ) -> None:
        """Make a call; its results count once it has ended."""
        work = function(*arguments, group=self.group, async_op=self.asynchronous, **named)
        self.pending.append((work, results))

    def finish(self) -> None:
        """Wait for the calls under way; take up their results."""
        for work, results in self.pending:
            if work is not None:
                work.wait()
            for result in results:
                self._digest.update(np.ascontiguousarray(result).tobytes())
        self.pending.clear()

    def _mismatch(self, differs: int) -> None:
        self.asynchronous = False
        self.finish()
        array = self.array(self.count + (dist.get_rank() == differs))
        try:
            dist.all_reduce(array, group=self.group)
        except dist.CollectiveMismatchError as error:
            self._digest.update(type(error).__name__.encode())


def _ops_of(dtype: np.dtype[Any]) -> tuple[str, ...]:
    if dtype.kind in "iu":
        return (*_ORDERED, *_BITWISE)
    if dtype.kind == "b":
        return _BITWISE
    return _ARITHMETIC if dtype.kind == "c" else (*_ORDERED, "AVG")


def _all_reduce(at: Program) -> None:
    array = at.array(at.count)
    at.call(dist.all_reduce, array, op=at.op, results=[array])


def _reduce(at: Program) -> None:
    array = at.array(at.count)
    at.call(dist.reduce, array, at.root, op=at.op, results=[array])


def _broadcast(at: Program) -> None:
    array = at.array(at.count)
    at.call(dist.broadcast, array, at.root, results=[array])


def _all_gather(at: Program) -> None:
    outputs = [at.array(at.count, 1) for _ in at.ranks]
    at.call(dist.all_gather, outputs, at.array(at.count), results=outputs)


def _all_gather_into(at: Program) -> None:
    output = np.zeros(at.count * len(at.ranks), at.dtype)
    at.call(dist.all_gather_into_tensor, output, at.array(at.count), results=[output])


def _gather(at: Program) -> None:
    outputs = [at.array(at.count, 1) for _ in at.ranks] if dist.get_rank() == at.root else None
    at.call(dist.gather, at.array(at.count), outputs, dst=at.root, results=outputs or [])


def _scatter(at: Program) -> None:
    inputs = [at.array(at.count, lane) for lane in range(len(at.ranks))] if dist.get_rank() == at.root else None
    output = at.array(at.count, 1)
    at.call(dist.scatter, output, inputs, src=at.root, results=[output])


def _reduce_scatter(at: Program) -> None:
    output = np.zeros(at.count, at.dtype)
    at.call(dist.reduce_scatter_tensor, output, at.array(at.count * len(at.ranks)), op=at.op, results=[output])


def _all_to_all(at: Program) -> None:
    output = np.zeros(at.count * len(at.ranks), at.dtype)
    at.call(dist.all_to_all_single, output, at.array(at.count * len(at.ranks)), results=[output])


def _barrier(at: Program) -> None:
    at.call(dist.barrier, results=[])


def _messages(at: Program) -> None:
    """Send to the root from the next rank: some messages, received in the order of their tags reversed."""
    number, me = at.messages, dist.get_rank()
    sender = at.ranks[(at.ranks.index(at.root) + 1) % len(at.ranks)]
    if sender == at.root:
        return
    if me == sender:
        works = [dist.isend(at.array(at.count, tag), at.root, group=at.group, tag=tag) for tag in range(number)]
        at.pending += [(work, []) for work in works]
    if me == at.root:
        outputs = [at.array(at.count, 9) for _ in range(number)]
        works = [dist.irecv(outputs[tag], sender, group=at.group, tag=tag) for tag in reversed(range(number))]
        at.pending += [(work, []) for work in works] + [(None, outputs)]


def _short_messages(at: Program) -> None:
    """Send short messages to the root from the next rank, one for each of some tags, or both ways."""
    me, order, group = dist.get_rank(), at.order, at.group
    sender = at.ranks[(at.ranks.index(at.root) + 1) % len(at.ranks)]
    arrays = [at.array(min(at.count, 1000), lane) for lane in range(len(at.tags))]
    outputs = [at.array(array.size, 9) for array in arrays]
    if order == "itself" or sender == at.root:
        if me == at.root:
            for array, output, tag in zip(arrays, outputs, at.tags, strict=True):
                at.pending += [(dist.irecv(output, me, group, tag), []), (dist.isend(array, me, group, tag), [output])]
    elif order == "batch" and me in (sender, at.root):
        other = at.root if me == sender else sender
        pairs = zip((dist.isend, dist.irecv), (arrays, outputs), strict=True)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(op, array, other, group, tag)
                for op, some in pairs
                for array, tag in zip(some, at.tags, strict=True)
            ]
        )
        at.pending += [(work, []) for work in works] + [(None, outputs)]
    elif me == sender:
        for number, (array, output, tag) in enumerate(zip(arrays, outputs, at.tags, strict=True)):
            if order == "begun" and number % 2 == 0:
                at.pending.append((dist.isend(array, at.root, group, tag), []))
            else:
                dist.send(array, at.root, group, tag)
            if order == "answered":
                dist.recv(output, at.root, group, tag)
                at.pending.append((None, [output]))
    elif me == at.root:
        given = list(zip(outputs, at.tags, strict=True))
        for number, (output, tag) in enumerate(sorted(given, key=lambda one: one[1]) if order == "sorted" else given):
            work = None
            if order == "posted" and number % 2 == 0:
                work = dist.irecv(output, sender, group, tag)
            else:
                from_any = order == "any" and len(at.ranks) == 2  # a third rank may be further on
                assert dist.recv(output, None if from_any else sender, group, tag) == sender
            at.pending.append((work, [output]))
            if order == "answered":
                dist.send(output, sender, group, tag)
