"""The matrix: which cells there are, and what a rank does to go through them."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import rankmesh as dist
from support import oracle
from support.matrix.calls import CALLS, MESSAGES, MOVING, REDUCING, VARIANTS
from support.matrix.cell import DTYPES, At, Cell
from support.matrix.containers import CONTAINERS, bits, fits
from support.matrix.lists import LISTS
from support.me import Me

TOLD = 20
"""Mismatches a rank tells of each part."""
LARGE, LARGER = 20_001, 70_001
"""Elements of float32 above the limits for small arrays; and several times above them. Over messages these may be
reduced in another order, so they are whole numbers, whose sums are exact."""


def reductions(choice: random.Random, size: int) -> Iterator[Cell]:
    """Every operation on every element type in every call that reduces; some in the variants of these."""
    for name, dtype in itertools.product(REDUCING, DTYPES):
        ops = ops_of(dtype)
        for op in [choice.choice(ops)] if name in VARIANTS else ops:
            yield Cell(name, dtype, op, *_rest(choice, size, dtype))


def moves(choice: random.Random, size: int) -> Iterator[Cell]:
    """Every element type in every call that does not."""
    for name, dtype in itertools.product(MOVING, DTYPES):
        yield Cell(name, dtype, "", *_rest(choice, size, dtype))


def containers(choice: random.Random, size: int) -> Iterator[Cell]:
    """Every container in every call."""
    for name, container in itertools.product(REDUCING | MOVING, CONTAINERS):
        dtype = choice.choice([dtype for dtype in DTYPES if fits(container, DTYPES[dtype])])
        op = choice.choice(ops_of(dtype)) if name in REDUCING else ""
        count, later = 1 if container == "0-d" else 15, choice.random() < 0.5
        yield Cell(name, dtype, op, container, count, later, choice.randrange(size))


def lengths(choice: random.Random, size: int) -> Iterator[Cell]:
    """No element, one, and more than fit into what small arrays use, in every call; many more in some."""
    small = itertools.product(("float32", "float16", "int8"), (0, 1))
    for name, (dtype, count) in itertools.product(REDUCING | MOVING, [*small, ("float32", LARGE)]):
        large = count == LARGE
        op = choice.choice([op for op in ops_of(dtype) if not large or op != "PREMUL_SUM"]) if name in REDUCING else ""
        later, numbers = choice.random() < 0.5, "whole" if large else "any"
        yield Cell(name, dtype, op, "contiguous", count, later, choice.randrange(size), numbers)
    for name, dtype in itertools.product(("all_reduce", "reduce", "broadcast"), ("float16", "float32", "complex128")):
        op = "SUM" if name in REDUCING else ""
        yield Cell(name, dtype, op, "strided", LARGER, choice.random() < 0.5, choice.randrange(size), "whole")


def specials(choice: random.Random, size: int) -> Iterator[Cell]:
    """NaN, infinities and signed zeros."""
    for name, dtype in itertools.product(("all_reduce", "reduce_scatter"), DTYPES):
        for op in ops_of(dtype) if DTYPES[dtype].kind in "fcV" else ():
            yield Cell(name, dtype, op, *_rest(choice, size, dtype), numbers="special")


def products(choice: random.Random, size: int) -> Iterator[Cell]:
    """Products of complex numbers, which NumPy does not round alike everywhere."""
    for dtype, count in itertools.product(("complex64", "complex128"), (1, 2, 3, 7, 33, 4_001)):
        for name in ("all_reduce", "batch"):
            yield Cell(name, dtype, "PRODUCT", count=count, numbers="rounded")


def messages(choice: random.Random, size: int) -> Iterator[Cell]:
    """Every element type and every container, from rank to rank."""
    if size == 1:
        return  # there is nobody to send to
    for name, dtype in itertools.product(MESSAGES, DTYPES):
        yield Cell(name, dtype, "", *_rest(choice, size, dtype))
    for name, container, later in itertools.product(MESSAGES, CONTAINERS, (False, True)):
        dtype = choice.choice([dtype for dtype in DTYPES if fits(container, DTYPES[dtype])])
        yield Cell(name, dtype, "", container, choice.choice((1, 15)), later)
    for name, count, later in itertools.product(MESSAGES, (0, LARGE), (False, True)):
        yield Cell(name, "float32", "", "strided", count, later)


Part = Callable[[random.Random, int], Iterator[Cell]]

PARTS: tuple[Part, ...] = (reductions, moves, containers, lengths, specials, products, messages)
"""What the matrix is made of: functions of what chooses what is not said, and of the number of ranks."""


def ops_of(dtype: str) -> list[str]:
    """Return the names of the operations that are defined for an element type."""
    found = sorted(op.name for op in oracle.ops_of(DTYPES[dtype]))
    return found if dtype == "bool" else [*found, "PREMUL_SUM"]


def _rest(choice: random.Random, size: int, dtype: str) -> tuple[str, int, bool, int]:
    """Return what else a cell needs: container, count, asynchronous or not, root."""
    count = choice.choice((1, 5, 33))
    container = choice.choice([name for name in CONTAINERS if fits(name, DTYPES[dtype], count)])
    return container, count, choice.random() < 0.5, choice.randrange(size)


def sweep(me: Me, make: Part, group: Any = None, every: int = 1) -> None:
    """Go through the cells of a part, and tell the test how many there were, what was wrong, and a digest.

    The digest is of what is the same at all ranks: the arrays of all_reduce, bit for bit.

    Args:
        me: who tells.
        make: the part.
        group: the group that makes the calls, None for the world; a rank outside it does nothing.
        every: go through every so many of the cells only.
    """
    if dist.get_rank(group) < 0:
        return
    cells, wrong, digest = 0, list[str](), hashlib.sha256()
    for cell in cells_of(make, dist.get_world_size(group))[::every]:
        at = At(cell, group)
        try:
            (CALLS | LISTS)[cell.name](at)
        except Exception as error:
            error.add_note(f"in {cell}")
            raise
        cells += 1
        wrong += at.wrong()
        if cell.name == "all_reduce":
            digest.update(bits(at.parts[0].held.read()))
    told = {"cells": cells, "wrong": wrong[:TOLD], "digest": digest.hexdigest()}
    me.say(**{make.__name__ if group is None else f"{make.__name__} in {group.group_desc}": told})


def cells_of(make: Part, size: int) -> list[Cell]:
    """Return the cells of a part, the same at all ranks."""
    return list(make(random.Random(size), size))
