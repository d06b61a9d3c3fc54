"""Seeded programs of a fault run: collectives, sub-groups, messages and store calls, each result checked against NumPy.

A program is a list of steps, plain data, that every rank goes through in rounds; ``generate`` draws it, ``Runner``
carries it out. What a rank contributes follows from the seed, the round, the step and the rank, so that every rank can
compute what every other one must get.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Step = dict[str, Any]
Check = Callable[[], None]
Expected = list[tuple[Array, Array]]

WORLD = -1
DTYPES = ("float32", "float64", "int64", "int32", "uint8", "float16", "complex64")
GLOO_DTYPES = ("float32", "float64", "int64", "int32", "uint8", "float16")
COUNTS = (1, 7, 1000, 1000, 20_000, 70_001, 400_000)
COLLECTIVES = (
    "all_reduce", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter_tensor", "all_to_all_single", "barrier", "all_gather_object",
)  # fmt: skip
GLOO_COLLECTIVES = tuple(set(COLLECTIVES) - {"reduce_scatter_tensor"})
REDUCTIONS = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}
_NEVER_ASYNC = ("all_gather_object",)
_BASE = np.arange(max(COUNTS), dtype=np.uint32)


class WrongResult(Exception):  # it is an outcome of a run, not an error of the program
    """A result that differs from NumPy's."""


def generate(
    rng: random.Random, size: int, *, length: int, gloo: bool = False, store: bool = True
) -> tuple[list[list[int]], list[Step]]:
    """Return sub-groups (lists of global ranks) and the steps of a program of ``size`` ranks.

    Args:
        rng: draws it.
        size: world size.
        length: number of steps.
        gloo: whether only what gloo has too is drawn.
        store: whether store calls are.
    """
    subgroups = [
        sorted(rng.sample(range(size), rng.randint(2, size)))
        for _ in range(rng.choice((0, 1, 1, 2)) if size > 2 else 0)
    ]
    kinds = ["collective"] * 5 + ["batch"] * 2 + ["ring", "pair", "pause"] + ["store"] * store
    steps = [_step(rng, rng.choice(kinds), size, len(subgroups), gloo) for _ in range(length - 1)]
    # At least one step in which every rank waits for every other.
    together = {**_collective(rng, "all_reduce", len(subgroups), gloo), "group": WORLD}
    steps.insert(rng.randrange(length), together)
    return subgroups, steps


def _step(rng: random.Random, kind: str, size: int, subgroups: int, gloo: bool) -> Step:
    names = GLOO_COLLECTIVES if gloo else COLLECTIVES

    def draw() -> Step:
        return _collective(rng, rng.choice(sorted(names)), subgroups, gloo)

    if kind == "collective":
        return draw()
    if kind == "batch":
        parts = [draw() for _ in range(rng.randint(2, 4))]
        return {"do": "batch", "parts": [part for part in parts if part["op"] not in _NEVER_ASYNC] or [draw_safe(rng)]}
    if kind in ("ring", "pair"):
        src, dst = rng.sample(range(size), 2)
        message = {"count": rng.choice(COUNTS), "dtype": rng.choice(GLOO_DTYPES), "tag": rng.randrange(3)}
        return {"do": kind, "src": src, "dst": dst, "nonblocking": rng.random() < 0.5, **message}
    if kind == "store":
        return {"do": "keys", "mode": rng.choice(("get", "get", "wait", "add")), "owner": rng.randrange(size)}
    return {"do": "pause", "rank": rng.randrange(size), "seconds": rng.choice((0.001, 0.005, 0.02))}


def draw_safe(rng: random.Random) -> Step:
    """Return a collective that both libraries have, synchronous and asynchronous."""
    return _collective(rng, "all_reduce", 0, True)


def _collective(rng: random.Random, op: str, subgroups: int, gloo: bool) -> Step:
    group = rng.randrange(subgroups) if subgroups and rng.random() < 0.4 else WORLD
    return {
        "do": "collective", "op": op, "group": group, "dtype": rng.choice(GLOO_DTYPES if gloo else DTYPES),
        "count": rng.choice(COUNTS), "root": rng.randrange(60), "reduction": rng.choice(sorted(REDUCTIONS)),
        "async": op not in _NEVER_ASYNC and rng.random() < 0.3,
    }  # fmt: skip


def describe(step: Step) -> str:
    """Return a step in words."""
    if step["do"] == "collective":
        where = "world" if step["group"] == WORLD else f"sub-group {step['group']}"
        return f"{step['op']} {step['dtype']}[{step['count']}] in {where}{' async' if step['async'] else ''}"
    if step["do"] == "batch":
        return f"in flight together: {'; '.join(describe(part) for part in step['parts'])}"
    return " ".join(f"{name}={value}" for name, value in step.items())


def of_world(step: Step, rank: int, subgroups: Sequence[Sequence[int]]) -> bool:
    """Return whether a rank makes a collective in this step."""
    return step["do"] == "collective" and (step["group"] == WORLD or rank in subgroups[step["group"]])


class Runner:
    """Carries out a program at one rank.

    Args:
        dist: rankmesh, or torch.distributed.
        wrap: makes the library's tensor of an array, in the same memory.
        seed: of the values.
        subgroups: global ranks of the sub-groups.
        timeout: seconds a store call may take.
        phase: name of this run of a program, in the keys of the store.
    """

    def __init__(
        self,
        dist: Any,
        wrap: Callable[[Array], Any],
        seed: int,
        subgroups: Sequence[Sequence[int]],
        timeout: float,
        phase: str,
    ) -> None:
        self._dist, self._wrap, self._seed, self._timeout, self._phase = dist, wrap, seed, timeout, phase
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._members: list[Sequence[int]] = [*subgroups, range(self.size)]  # -1 is the world
        self._groups: list[Any] = [dist.new_group(list(ranks)) for ranks in subgroups] + [None]
        self._store: Any = None
        self.spoil = False
        """Whether the next result is changed before it is checked: a planted fault."""
        self.between: Callable[[], None] | None = None
        """Called once, when the calls of a batch are under way."""

    def step(self, step: Step, number: str) -> None:
        """Carry out one step; raise WrongResult if a result is wrong."""
        if step["do"] == "batch":
            begun = [self._begin(part, f"{number}.{i}", True) for i, part in enumerate(step["parts"])]
            self.call_between()
            for work, check in begun:
                if work is not None:
                    work.wait()
                check()
        elif step["do"] == "collective":
            work, check = self._begin(step, number, step["async"])
            if work is not None:
                self.call_between()
                work.wait()
            check()
        else:
            getattr(self, f"_{step['do']}")(step, number)

    def in_new_group(self, step: Step, number: str) -> None:
        """Carry out a step in a group of all ranks that is made for it."""
        self._members.insert(-1, range(self.size))
        self._groups.insert(-1, self._dist.new_group(list(range(self.size))))
        self.step({**step, "group": len(self._groups) - 2}, f"{number}-new")

    def call_between(self) -> None:
        """Call what is to be called between the begin and the wait, if anything is."""
        between, self.between = self.between, None
        if between is not None:
            between()

    def values(self, number: str, rank: int, piece: int, step: Step) -> Array:
        """Return what a rank contributes to a step: small numbers, whose sums are exact in every dtype."""
        drawn = zlib.crc32(f"{self._seed}/{number}/{rank}/{piece}".encode())
        return ((_BASE[: step["count"]] * (drawn % 7 + 1) + (drawn >> 8) % 11) % 5).astype(step["dtype"])

    def _check(self, what: str, pairs: Expected) -> None:
        for got, expected in pairs:
            if self.spoil:
                self.spoil = False
                got.reshape(-1)[0] += 1
            if not np.array_equal(got, expected):
                first = int(np.argmax(got != expected))
                raise WrongResult(f"{what}: element {first} is {got[first]!r}, NumPy has {expected[first]!r}")

    def _begin(self, step: Step, number: str, async_op: bool) -> tuple[Any, Check]:
        """Make the call; return its work, if it is asynchronous, and the check of its result."""
        group, ranks = self._groups[step["group"]], self._members[step["group"]]
        if self.rank not in ranks:
            return None, lambda: None
        pairs: Expected = []
        result = getattr(self, f"_{step['op']}")(step, number, list(ranks), pairs, {"group": group}, async_op)
        return result if async_op else None, lambda: self._check(f"step {number}, {describe(step)}", pairs)

    # One method a collective: it makes the call, and adds to ``pairs`` what comes out with what has to.

    def _all_reduce(self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool) -> Any:
        parts = [self.values(number, rank, 0, step) for rank in ranks]
        array = parts[ranks.index(self.rank)].copy()
        pairs.append((array, self._reduced(step, parts)))
        return self._dist.all_reduce(self._wrap(array), op=self._op(step), async_op=later, **on)

    def _op(self, step: Step) -> Any:
        return getattr(self._dist.ReduceOp, self._reduction(step))

    @staticmethod
    def _reduction(step: Step) -> str:
        return "SUM" if step["dtype"].startswith("complex") else str(step["reduction"])

    def _reduced(self, step: Step, parts: list[Array]) -> Array:
        total = parts[0]
        for part in parts[1:]:
            total = REDUCTIONS[self._reduction(step)](total, part)
        return total

    def _broadcast(self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool) -> Any:
        root = ranks[step["root"] % len(ranks)]
        wanted = self.values(number, root, 0, step)
        array = wanted.copy() if self.rank == root else np.zeros_like(wanted)
        pairs.append((array, wanted))
        return self._dist.broadcast(self._wrap(array), src=root, async_op=later, **on)

    def _reduce(self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool) -> Any:
        root = ranks[step["root"] % len(ranks)]
        parts = [self.values(number, rank, 0, step) for rank in ranks]
        array = parts[ranks.index(self.rank)].copy()
        if self.rank == root:
            pairs.append((array, self._reduced(step, parts)))
        return self._dist.reduce(self._wrap(array), dst=root, op=self._op(step), async_op=later, **on)

    def _all_gather(self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool) -> Any:
        wanted = [self.values(number, rank, 0, step) for rank in ranks]
        out = [np.zeros_like(part) for part in wanted]
        pairs.extend(zip(out, wanted, strict=True))
        own = self._wrap(wanted[ranks.index(self.rank)])
        return self._dist.all_gather([self._wrap(part) for part in out], own, async_op=later, **on)

    def _all_gather_into_tensor(
        self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool
    ) -> Any:
        parts = [self.values(number, rank, 0, step) for rank in ranks]
        wanted = np.concatenate(parts)
        out = np.zeros_like(wanted)
        pairs.append((out, wanted))
        own = self._wrap(parts[ranks.index(self.rank)])
        return self._dist.all_gather_into_tensor(self._wrap(out), own, async_op=later, **on)

    def _gather(self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool) -> Any:
        root = ranks[step["root"] % len(ranks)]
        wanted = [self.values(number, rank, 0, step) for rank in ranks]
        out = [np.zeros_like(part) for part in wanted] if self.rank == root else None
        if out is not None:
            pairs.extend(zip(out, wanted, strict=True))
        places = None if out is None else [self._wrap(part) for part in out]
        own = self._wrap(wanted[ranks.index(self.rank)])
        return self._dist.gather(own, places, dst=root, async_op=later, **on)

    def _scatter(self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool) -> Any:
        root = ranks[step["root"] % len(ranks)]
        parts = [self.values(number, root, piece, step) for piece in range(len(ranks))]
        wanted = parts[ranks.index(self.rank)]
        out = np.zeros_like(wanted)
        pairs.append((out, wanted))
        given = [self._wrap(part) for part in parts] if self.rank == root else None
        return self._dist.scatter(self._wrap(out), given, src=root, async_op=later, **on)

    def _reduce_scatter_tensor(
        self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool
    ) -> Any:
        place = ranks.index(self.rank)
        given = np.concatenate([self.values(number, self.rank, piece, step) for piece in range(len(ranks))])
        wanted = self._reduced(step, [self.values(number, rank, place, step) for rank in ranks])
        out = np.zeros_like(wanted)
        pairs.append((out, wanted))
        op = self._op(step)
        return self._dist.reduce_scatter_tensor(self._wrap(out), self._wrap(given), op=op, async_op=later, **on)

    def _all_to_all_single(
        self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool
    ) -> Any:
        place = ranks.index(self.rank)
        given = np.concatenate([self.values(number, self.rank, piece, step) for piece in range(len(ranks))])
        wanted = np.concatenate([self.values(number, rank, place, step) for rank in ranks])
        out = np.zeros_like(wanted)
        pairs.append((out, wanted))
        return self._dist.all_to_all_single(self._wrap(out), self._wrap(given), async_op=later, **on)

    def _barrier(self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool) -> Any:
        return self._dist.barrier(async_op=later, **on)

    def _all_gather_object(
        self, step: Step, number: str, ranks: list[int], pairs: Expected, on: Any, later: bool
    ) -> Any:
        out: list[Any] = [None] * len(ranks)
        self._dist.all_gather_object(out, {"rank": self.rank, "step": number}, **on)
        if out != [{"rank": rank, "step": number} for rank in ranks]:
            raise WrongResult(f"step {number}, all_gather_object: {out}")

    # Messages and the store

    def _message(self, step: Step, number: str, src: int) -> tuple[Array, Array]:
        wanted = self.values(number, src, 0, step)
        return np.zeros_like(wanted), wanted

    def _ring(self, step: Step, number: str) -> None:
        dist, tag = self._dist, step["tag"]
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        got, wanted = self._message(step, number, left)
        own = self._wrap(self.values(number, self.rank, 0, step))
        if step["nonblocking"]:
            works = [dist.isend(own, right, tag=tag), dist.irecv(self._wrap(got), left, tag=tag)]
            self.call_between()
            for work in works:
                work.wait()
        elif self.rank % 2:
            dist.recv(self._wrap(got), left, tag=tag)
            dist.send(own, right, tag=tag)
        else:
            dist.send(own, right, tag=tag)
            dist.recv(self._wrap(got), left, tag=tag)
        self._check(f"step {number}, ring", [(got, wanted)])

    def _pair(self, step: Step, number: str) -> None:
        if self.rank == step["src"]:
            own = self._wrap(self.values(number, self.rank, 0, step))
            if step["nonblocking"]:
                self._dist.isend(own, step["dst"], tag=step["tag"]).wait()
            else:
                self._dist.send(own, step["dst"], tag=step["tag"])
        elif self.rank == step["dst"]:
            got, wanted = self._message(step, number, step["src"])
            self._dist.recv(self._wrap(got), step["src"], tag=step["tag"])
            self._check(f"step {number}, pair", [(got, wanted)])

    def _keys(self, step: Step, number: str) -> None:
        if self._store is None:
            self._store = getattr(self._dist, "distributed_c10d", self._dist)._get_default_store()
            self._store.set_timeout(timedelta(seconds=self._timeout))
        store, key = self._store, f"{self._phase}/{number}"
        value = f"{key} of {step['owner']}".encode()
        if step["mode"] == "add":
            if not 1 <= (count := store.add(key, 1)) <= self.size:
                raise WrongResult(f"step {number}, store add: {count} of {self.size}")
            self._dist.barrier()
            if (found := store.get(key)) != str(self.size).encode():
                raise WrongResult(f"step {number}, store: {self.size} adds of 1 made {found!r}")
            return
        if self.rank == step["owner"]:
            store.set(key, value)
        elif step["mode"] == "wait":
            store.wait([key], timedelta(seconds=self._timeout))
        if (found := store.get(key)) != value:
            raise WrongResult(f"step {number}, store: {key} is {found!r}")

    def _pause(self, step: Step, number: str) -> None:
        if self.rank == step["rank"]:
            time.sleep(step["seconds"])
