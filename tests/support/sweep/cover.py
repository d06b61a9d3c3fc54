"""Which cells there are, and what a rank does to go through them.

Of all combinations, as many are taken as make every value of every dimension meet every value of every other one, where
the two go together: some hundred cells in place of a hundred thousand, the same ones at all ranks and in every run. The
worlds of a sweep, of several sizes, share them: which world makes the call is one of the dimensions.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.wire.dtypes import FROM_NAME as DTYPES
from support.me import Me
from support.sweep.calls import CALLS, MESSAGES, MOVING, MOVING_LISTS, ORDERED, REDUCING, REDUCING_LISTS
from support.sweep.cell import At, Cell, Place, ops_of
from support.sweep.containers import CONTAINERS, ON_GPUS, bits, fits

TOLD = 20
"""Mismatches that a rank reports."""
_FEW = 100
"""Elements up to which any numbers are used; longer arrays hold whole numbers, so that sums are exact."""
_MOST_BYTES = 1 << 20
_TRIES = 6
_WITH_ROOTS = {"name", "count", "async_op", "world"}
"""What is to meet every root: a root sees bytes, whatever they mean."""


class Space(NamedTuple):
    """The dimensions of a sweep; see Cell.

    Attributes:
        names: the calls.
        dtypes: the element types.
        containers: what holds the elements.
        counts: the numbers of elements.
        asynchronous: whether calls are made asynchronously, too.
        premultiplied: whether PREMUL_SUM is an operation.
        special: whether numbers are NaN, infinities and signed zeros, too.
        any_order: whether the ranks' elements may be added and multiplied in another order than that of the ranks: then
            only numbers will do whose results are exact, or results are compared roughly.
        rounds: whether that is not all: sums and averages of floats are rounded in a way of their own.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    containers: tuple[str, ...] = ("contiguous",)
    counts: tuple[int, ...] = (0, 1, 33)
    asynchronous: bool = True
    premultiplied: bool = True
    special: bool = True
    any_order: bool = False
    rounds: bool = False


STANDARD = tuple(name for name, dtype in DTYPES.items() if dtype.kind != "V" or name == "bfloat16")
_COLLECTIVES = (
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_uneven", "reduce_scatter_in_place", "broadcast",
    "all_gather", "all_gather_uneven", "gather", "scatter", "all_to_all", "all_to_all_uneven",
)  # fmt: skip
NOT_IN_TORCH = ("batch", "gather_single", "gather_uneven", "scatter_uneven")
SLOT_BYTES = 1 << 13
"""Small slots of shared memory, so that short arrays take several steps."""
SPACES: dict[str, Space] = {
    "api": Space(
        (*REDUCING, *MOVING, *MESSAGES), STANDARD, tuple(CONTAINERS), counts=(0, 1, 5, 33, 4_001, 20_001, 70_001)
    ),
    "groups": Space((*REDUCING, *MOVING, *MESSAGES), ("float32", "int8", "float16", "complex128"), tuple(CONTAINERS)),
    "lists": Space(
        (*REDUCING_LISTS, *MOVING_LISTS),
        ("int32", "float16", "float32"),
        ("contiguous", "strided", "transposed", "byteswapped"),
        counts=(0, 1, 15),
        any_order=True,
    ),
    "gpu": Space(
        (*REDUCING, *MOVING, *ORDERED),
        tuple(name for name in STANDARD if "long" not in name),  # CuPy has none
        tuple(ON_GPUS),
        counts=(0, 1, 7, 33, 1000, (1 << 18) + 3),
        special=False,
    ),
    # A part of a slot, a slot of 8 bytes an element and one past it, several; the last take no part in an arrival.
    "communicator": Space(
        (*_COLLECTIVES, "messages"), counts=(0, 1, 2, 7, 331, 1024, 1025, 2049, 9_001), premultiplied=False
    ),
    "torch": Space(
        tuple(name for name in (*REDUCING, *MOVING, *MESSAGES) if name not in NOT_IN_TORCH),
        tuple(name for name in STANDARD if "long" not in name),
        ("contiguous", "part", "strided", "transposed", "block", "0-d"),
        counts=(0, 1, 33, 4_001),
        premultiplied=False,
    ),
    "http": Space(
        ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"),
        counts=(0, 1, 7, 4_099),
        asynchronous=False,
        premultiplied=False,
    ),
}
SPACES["mpi"] = SPACES["api"]._replace(any_order=True)
SPACES["gpu, in any order"] = SPACES["gpu"]._replace(any_order=True)
SPACES["gpu, roughly"] = SPACES["gpu"]._replace(any_order=True, rounds=True)
SPACES["groups, in any order"] = SPACES["groups"]._replace(any_order=True)
SPACES["any algorithm"] = SPACES["communicator"]._replace(any_order=True)


@functools.cache
def cells_of(space: str, sizes: tuple[int, ...]) -> tuple[tuple[Cell, ...], ...]:
    """Return the cells of a space for worlds of these sizes, by world; every pair of values is met in one of them."""
    given = SPACES[space]
    choice = random.Random(len(sizes))
    reducing = [name for name in given.names if name in REDUCING | REDUCING_LISTS]
    ops = sorted({op for dtype in given.dtypes for op in ops_of(dtype)}) + ["PREMUL_SUM"] * given.premultiplied
    dimensions: dict[str, list[Any]] = {
        "name": [name for name in given.names if max(sizes) > 1 or name not in MESSAGES | ORDERED],
        "dtype": list(given.dtypes),
        "op": [*ops, ""] if len(reducing) < len(given.names) else ops,
        "container": list(given.containers),
        "count": list(given.counts),
        "async_op": [False, True] if given.asynchronous else [False],
        "root": list(range(max(sizes))),
        "numbers": ["any", *["special"] * given.special, "rounded"],
        "world": list(range(len(sizes))),
    }
    missing = dict.fromkeys(
        pair
        for (one, firsts), (other, seconds) in itertools.combinations(dimensions.items(), 2)
        if "root" not in (one, other) or {one, other} & _WITH_ROOTS
        for pair in itertools.product(((one, value) for value in firsts), ((other, value) for value in seconds))
    )
    cells = []
    while missing:
        wanted = next(iter(missing))
        drawn = [_drawn(choice, dimensions, sizes, dict(wanted)) for _ in range(_TRIES)]
        best = max(filter(None, drawn), key=lambda cell: sum(pair in missing for pair in _pairs(cell)), default=None)
        if best is None:
            del missing[wanted]  # the two do not go together
            continue
        for pair in _pairs(best):
            missing.pop(pair, None)
        whole = best.count > _FEW and DTYPES[best.dtype].kind not in "biu" and best.numbers == "any"
        cells.append(best._replace(numbers="whole") if whole else best)
    if given.any_order:
        cells = [found for cell in cells if (found := _in_any_order(cell, given.rounds))]
    return tuple(tuple(cell for cell in cells if cell.world == world) for world in range(len(sizes)))


def _pairs(cell: Cell) -> Iterable[Any]:
    return itertools.combinations(cell._asdict().items(), 2)


def _drawn(
    choice: random.Random, dimensions: dict[str, list[Any]], sizes: tuple[int, ...], fixed: dict[str, Any]
) -> Cell | None:
    """Return a cell with the fixed values and others at random, None if none is found that makes sense."""
    for _ in range(40):
        values = {name: fixed[name] if name in fixed else choice.choice(found) for name, found in dimensions.items()}
        if "op" not in fixed:
            defined = [op for op in ops_of(values["dtype"]) if op in dimensions["op"]]
            values["op"] = choice.choice(defined) if defined and values["name"] in REDUCING | REDUCING_LISTS else ""
        if "numbers" not in fixed:
            values["numbers"] = "any"
        size = sizes[values["world"]]
        if "root" not in fixed:
            values["root"] %= size
        cell = Cell(**values)
        if cell.root < size and (size > 1 or cell.name not in MESSAGES | ORDERED) and _makes_sense(cell):
            return cell
    return None


def _makes_sense(cell: Cell) -> bool:
    dtype, op = DTYPES[cell.dtype], cell.op
    reduces = cell.name in REDUCING | REDUCING_LISTS
    if bool(op) != reduces or (op and op not in _ops(cell.dtype)):
        return False
    if cell.count * dtype.itemsize > _MOST_BYTES or (cell.count > 30_000 and cell.name not in _LONG):
        return False
    if cell.container not in ON_GPUS and not fits(cell.container, dtype, cell.count):
        return False
    if cell.count > _FEW and (op == "PREMUL_SUM" or cell.container not in ("contiguous", "strided", *ON_GPUS)):
        return False
    product = op == "PRODUCT" and dtype.kind == "c"
    if product and cell.count > _FEW:
        return False  # the signs of its zeros depend on the order
    if cell.numbers == "rounded":  # products of complex numbers, which NumPy does not round alike everywhere
        return product and cell.name in ("all_reduce", "batch")
    return cell.numbers == "any" or (reduces and cell.count <= _FEW and dtype.kind in "fc" and op != "PREMUL_SUM")


_LONG = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "messages_in_order"})
"""Calls of which very long arrays are passed to."""


def _ops(dtype: str) -> list[str]:
    premultiplied = dtype != "bool" and (DTYPES[dtype].kind != "V" or dtype == "bfloat16")
    return [*ops_of(dtype), "PREMUL_SUM"] if premultiplied else ops_of(dtype)


def _in_any_order(cell: Cell, rounds: bool) -> Cell | None:
    """Return a cell like this one, None where nothing can be reported of its result."""
    kind = DTYPES[cell.dtype].kind
    product = (kind == "c" or cell.dtype == "complex32") and cell.op == "PRODUCT"
    if kind in "biu" or not cell.op:
        return cell
    if cell.numbers == "special":
        # A product of complex infinities and zeros is a NaN, or not, depending on which come first.
        return None if product else cell._replace(numbers="special, roughly")
    if rounds or product or (cell.op == "PREMUL_SUM" and cell.numbers == "any"):
        return cell._replace(numbers="rounded")
    return cell._replace(numbers="whole") if cell.numbers == "any" else cell


def go_through(api: Any, cells: Iterable[Cell], group: Any = None, place: Place = np.copy) -> dict[str, Any]:
    """Go through cells; return what was wrong, and a digest of all_reduce's arrays, which are the same at all ranks.

    Args:
        api: has the functions: rankmesh, or one of media's.
        cells: the calls to make.
        group: the group that makes the calls, None for the world.
        place: see At.
    """
    wrong, digest = list[str](), hashlib.sha256()
    for cell in cells:
        at = At(cell, api, group, place)
        try:
            CALLS[cell.name](at)
        except Exception as error:
            error.add_note(f"in {cell}")
            raise
        wrong += at.wrong()
        if cell.name == "all_reduce":
            digest.update(bits(at.parts[0].held.read()))
    return {"wrong": wrong[:TOLD], "digest": digest.hexdigest()}


def sweep(me: Me, name: str, cells: Iterable[Sequence[Any]], api: Any, group: Any = None) -> None:
    """Go through cells, which came to a rank's process as JSON, and report it to the test by this name."""
    me.report(**{name: go_through(api, itertools.starmap(Cell, cells), group)})
