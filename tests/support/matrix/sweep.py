"""The matrix: which cells there are, and what a rank does to go through them."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import rankmesh as dist
from support import oracle
from support.matrix.calls import CALLS, MESSAGES, MOVING, ORDERED, REDUCING, VARIANTS
from support.matrix.cell import DTYPES, At, Cell
from support.matrix.containers import CONTAINERS, ON_GPUS, bits, fits
from support.matrix.lists import LISTS
from support.me import Me

TOLD = 20
"""Mismatches a rank tells of each part."""
LARGE, LARGER = 20_001, 70_001
"""Elements of float32 above the limits for small arrays; and several times above them. Over messages these may be
reduced in another order, so they are whole numbers, whose sums are exact."""

OVER_A_MEBIBYTE = (1 << 18) + 3
"""Elements of float32 that take a little more than 1 MiB."""


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


def on_gpus(choice: random.Random, size: int, *, exact: bool = True) -> Iterator[Cell]:
    """Arrays on GPUs in every call: every element type with every operation, and every length.

    Args:
        choice: see PARTS.
        size: see PARTS.
        exact: whether reductions are to be NumPy's bit for bit.
    """
    dtypes = [dtype for dtype in DTYPES if DTYPES[dtype] != np.longdouble]  # CuPy has none

    def cell(name: str, dtype: str, count: int) -> Iterator[Cell]:
        ops = ops_of(dtype) if name in REDUCING else [""]
        for op in [choice.choice(ops)] if name in VARIANTS or count > 33 else ops:
            numbers = "any" if exact or not op or DTYPES[dtype].kind in "biu" else "rounded"
            container = choice.choice(list(ON_GPUS))
            yield Cell(name, dtype, op, container, count, choice.random() < 0.5, choice.randrange(size), numbers)

    for name, dtype in itertools.product(REDUCING | MOVING | ORDERED, dtypes):
        yield from cell(name, dtype, choice.choice((1, 7, 33)))
    for name, count in itertools.product(REDUCING | MOVING | ORDERED, (0, 1000)):
        yield from cell(name, choice.choice(dtypes), count)
    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "all_to_all_single_uneven", "messages_in_order"):
        yield from cell(name, "float32", OVER_A_MEBIBYTE)


def roughly_on_gpus(choice: random.Random, size: int) -> Iterator[Cell]:
    """As on_gpus, but reductions of what is not exact have an order of their own, and rounding."""
    return on_gpus(choice, size, exact=False)


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


def sweep(me: Me, make: Part, group: Any = None, every: int = 1, *, any_order: bool = False) -> None:
    """Go through the cells of a part, and tell the test how many there were, what was wrong, and a digest.

    The digest is of what is the same at all ranks: the arrays of all_reduce, bit for bit.

    Args:
        me: who tells.
        make: the part.
        group: the group that makes the calls, None for the world; a rank outside it does nothing.
        every: go through every so many of the cells only.
        any_order: see cells_of.
    """
    if dist.get_rank(group) < 0:
        return
    cells, wrong, digest = 0, list[str](), hashlib.sha256()
    for cell in cells_of(make, dist.get_world_size(group), any_order=any_order)[::every]:
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


def cells_of(make: Part, size: int, *, any_order: bool = False) -> list[Cell]:
    """Return the cells of a part, the same at all ranks.

    Args:
        make: the part.
        size: how many ranks there are.
        any_order: the ranks' elements may be added and multiplied in another order than that of the ranks, so that
            only numbers will do whose results are exact, or those are compared roughly.
    """
    cells = list(make(random.Random(size), size))
    return [found for cell in cells if (found := _in_any_order(cell))] if any_order else cells


def _in_any_order(cell: Cell) -> Cell | None:
    """Return a cell like this one, None where nothing can be said of its result."""
    kind = DTYPES[cell.dtype].kind
    product = kind == "c" and cell.op == "PRODUCT"
    if kind in "biu" or not cell.op:
        return cell
    if cell.numbers == "special":
        # A product of complex infinities and zeros is a NaN, or not, depending on which come first.
        return None if product else cell._replace(numbers="special, roughly")
    if product or (cell.op == "PREMUL_SUM" and cell.numbers == "any"):
        return cell._replace(numbers="rounded")
    return cell._replace(numbers="whole") if cell.numbers == "any" else cell
