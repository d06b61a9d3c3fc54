"""Cells of the sweep: a call of a function of the API, with the result that NumPy gives.

A cell is one of calls.CALLS with an operation, an element type, a container, a number of elements, a root, synchronous
or not. The API is ``rankmesh`` itself, or anything that has the same functions: see media.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rankmesh_agent.wire.dtypes import FROM_NAME as DTYPES
from rankmesh_agent.wire.ops import ReduceOp
from support import oracle
from support.sweep.containers import ON_GPUS, Array, Held, bits, fits, hold, same

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e-7, 6e4]
MAX_SIZE = 16
_BEGINNINGS = 4099
Place = Callable[[Array], Array]


class Cell(NamedTuple):
    """One call that all ranks make.

    Attributes:
        name: a key of calls.CALLS.
        dtype: a key of DTYPES.
        op: name of a ReduceOp, '' for calls that do not reduce.
        container: a key of containers.CONTAINERS, or ON_GPUS; what does not fit in is passed in a plain array.
        count: elements a rank contributes, or gets.
        async_op: whether to make it asynchronously.
        root: group rank, for calls with a source or destination.
        numbers: ``any`` over all of the dtype's range; ``whole`` ones, small; ``special`` ones, NaN, infinities, zeros
            of both signs (``special, roughly``, if the order in which they are reduced is not known); or ``rounded``,
            whose reduction is not exact. Whether NumPy rounds a product of complex numbers once or twice depends on how
            it lies in memory, and NCCL has an order of its own: they are compared among the ranks, and only roughly
            with NumPy.
        world: which of the worlds that share the cells makes the call.
    """

    name: str
    dtype: str
    op: str = ""
    container: str = "contiguous"
    count: int = 33  # type: ignore[assignment]  # of tuple, which nothing calls
    async_op: bool = False
    root: int = 0
    numbers: str = "any"
    world: int = 0

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self._asdict().items() if value and name != "name")
        return f"{self.name}({given})"


class Part(NamedTuple):
    """A container that took part in a call, and what must be in it afterwards."""

    what: str
    held: Held
    wanted: Array


class At:
    """A rank at a cell: hands out the containers to pass, makes the call, and compares.

    Args:
        cell: the cell.
        api: has the functions.
        group: the group that makes the call, None for the world.
        place: puts contiguous arrays where they are to lie.
    """

    def __init__(self, cell: Cell, api: Any, group: Any = None, place: Place = np.copy) -> None:
        self.cell = cell
        self.api = api
        self.group = group
        self.place = place
        self.rank = api.get_rank(group)
        self.size = api.get_world_size(group)
        self.ranks = range(self.size)
        self.numbers = api.get_process_group_ranks(group)
        self.dtype = DTYPES[cell.dtype]
        self.is_root = self.rank == cell.root
        self.on_gpu = cell.container in ON_GPUS
        self.parts: list[Part] = []
        self._works: list[Any] = []

    # What ranks contribute, and what becomes of it

    def values(self, rank: int, count: int | None = None, lane: int = 0) -> Array:
        """Return what a rank contributes; ``lane`` tells the arrays of a rank apart."""
        count = self.cell.count if count is None else count
        numbers = self.cell.numbers
        if numbers == "any" and self.dtype.kind == "c" and self.cell.op in ("PRODUCT", "PREMUL_SUM"):
            numbers = "whole"
        if numbers == "any" and self.cell.op == "AVG":
            numbers = "averaged"
        return _drawn(self.dtype, count, (rank, lane), numbers)

    @property
    def op(self) -> Any:
        """The operation to pass; every rank has its own factor for PREMUL_SUM."""
        op = ReduceOp[self.cell.op]
        return op(self._factor(self.rank)) if op is ReduceOp.PREMUL_SUM else op

    def reduced(self, values: Callable[[int], Array]) -> Array:
        """Return the reduction of what ``values(rank)`` is at each rank."""
        return self.reduction([(rank, values(rank)) for rank in self.ranks])

    def reduction(self, parts: list[tuple[int, Array]]) -> Array:
        """Return the reduction of arrays in this order, each with the rank it comes from."""
        key = self.cell.op, *((rank, id(array)) for rank, array in parts)
        found = _reduced.get(key)
        if found is None:
            if len(_reduced) > 256:
                _reduced.clear()
            found = _reduced[key] = self._reduction(parts), parts
        return found[0]

    def _reduction(self, parts: list[tuple[int, Array]]) -> Array:
        op, arrays = ReduceOp[self.cell.op], [array for _, array in parts]
        with np.errstate(all="ignore"):
            if op is ReduceOp.PREMUL_SUM:
                return oracle.expected(ReduceOp.SUM, [self._scaled(rank, array) for rank, array in parts])
            if len(arrays) == 1:
                return arrays[0]  # as it is: an infinite complex number divided by 1 would be a NaN
            return oracle.expected(op, arrays)

    def _factor(self, rank: int) -> Any:
        if self.dtype.kind in "iu":
            return rank + 2
        return complex(rank + 1, -2) if self.dtype.kind == "c" else 0.3 * rank - 1.1

    def _scaled(self, rank: int, part: Array) -> Array:
        wide = np.dtype(np.float32) if self.dtype in oracle.NARROW else self.dtype
        return np.multiply(part.astype(wide), wide.type(self._factor(rank)), dtype=wide).astype(self.dtype)

    # Containers to pass

    def becomes(self, before: Array, after: Array, *, what: str = "result", flat: bool = False) -> Any:
        """Return a container with elements that the call is to change."""
        container = self.cell.container
        if container == "contiguous" or not fits(container, before.dtype, before.size, flat=flat):
            array = self.place(before)
            held = Held(array, array.copy)
        else:
            held = hold(before, container)
        self.parts.append(Part(what, held, after))
        return held.tensor

    def given(self, elements: Array, *, flat: bool = False) -> Any:
        """Return a container with elements that the call is to read only."""
        return self.becomes(elements, elements, what="input", flat=flat)

    def wanted(self, elements: Array, *, flat: bool = False) -> Any:
        """Return a container that the call is to fill with elements."""
        return self.becomes(self.values(MAX_SIZE, elements.size), elements, what="output", flat=flat)

    def shaped(self, before: Array, after: Array, *shape: int, order: str = "C") -> Any:
        """Return an array of this shape with elements that the call is to change."""
        if self.on_gpu:
            held = hold(before, "gpu")
            self.parts.append(Part(f"array {shape}", held, after))
            return held.tensor.reshape(shape)
        array = np.array(before.reshape(shape), order=order)  # type: ignore[call-overload]
        self.parts.append(Part(f"array {shape}", Held(array, array.flatten), after))
        return array

    def root_as(self, name: str) -> dict[str, int]:
        """Return the argument that names the root: a global rank, or every other time a rank in the group."""
        root = self.cell.root
        return {f"group_{name}": root} if root % 2 else {name: self.numbers[root]}

    # The call

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Make the call, and wait for it if it is asynchronous."""
        work = function(*arguments, group=self.group, async_op=self.cell.async_op, **options)
        if not self.cell.async_op:
            assert work is None, f"a synchronous call returned {work!r}"
            return
        self.wait([work])

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for Works: they are complete then, or on a GPU once this thread's stream has been waited for."""
        for work in works:
            work.wait()
        self._works += [work for work in works if hasattr(work, "is_success")]
        if not self.on_gpu:
            self._settle()

    def _settle(self) -> None:
        for work in self._works:
            assert work.is_completed()
            assert work.is_success(), f"{self.cell}: {work.exception()}"
        self._works.clear()

    def wrong(self) -> Iterator[str]:
        """Return what is not as it must be, in words."""
        found_all = [part.held.read() for part in self.parts]
        self._settle()
        for (what, held, wanted), found in zip(self.parts, found_all, strict=True):
            if not _COMPARED.get(self.cell.numbers, same)(found, wanted):
                where = [index for index in range(wanted.size) if bits(found[index]) != bits(wanted[index])]
                first = where[0] if where else "?"
                yield (
                    f"{self.cell} at rank {self.rank} of {self.size}: {what} differs at {len(where)} of {wanted.size} "
                    f"elements, first [{first}]: {found[first:][:1]} for {wanted[first:][:1]} ({found.dtype})"
                )
            if not held.intact():
                yield f"{self.cell} at rank {self.rank} of {self.size}: memory around the {what} was written to"


@functools.lru_cache(4096)
def _drawn(dtype: np.dtype[Any], count: int, seed: tuple[int, int], numbers: str) -> Array:
    """Return numbers that begin elsewhere in the same sequence for every rank and lane."""
    begin = (1009 * seed[0] + 101 * seed[1]) % _BEGINNINGS
    return _sequence(dtype, max(_BEGINNINGS, 1 << count.bit_length()), numbers)[begin : begin + count]


@functools.lru_cache(256)
def _sequence(dtype: np.dtype[Any], count: int, numbers: str) -> Array:
    """Return numbers: the sum of MAX_SIZE ``averaged`` ones fits into 64 bits; see Cell for the others."""
    count += _BEGINNINGS
    rng = np.random.default_rng(count)
    if dtype.kind == "V" and dtype != ml_dtypes.bfloat16:
        array = oracle.values(0, count, dtype)
    elif numbers.startswith("special"):
        array = _of_parts(dtype, lambda: rng.choice(SPECIAL, count))
    elif numbers == "whole":
        array = _of_parts(dtype, lambda: rng.integers(-2, 3, count))
    elif dtype.kind == "b":
        array = rng.integers(0, 2, count).astype(dtype)
    elif dtype.kind in "iu":
        limits, room = np.iinfo(dtype), MAX_SIZE if numbers == "averaged" and dtype.itemsize == 8 else 1
        array = rng.integers(int(limits.min) // room, int(limits.max) // room, count, dtype, endpoint=True)
    else:
        array = _of_parts(dtype, lambda: rng.normal(size=count).astype(np.longdouble) / 3)
    array.flags.writeable = False
    return array


def _of_parts(dtype: np.dtype[Any], draw: Callable[[], Array]) -> Array:
    """Return an array with real, and where it has them imaginary, parts so drawn."""
    with np.errstate(all="ignore"):
        return (draw() + 1j * draw() if dtype.kind == "c" else draw()).astype(dtype)


def _equal_but_nan(found: Array, wanted: Array) -> bool:
    """Compare bit for bit, but take any NaN for any other: its sign and payload are not NumPy's to say."""
    if found.dtype != wanted.dtype or found.size != wanted.size:
        return False
    if found.dtype.kind == "c":
        found, wanted = found.view(found.real.dtype), wanted.view(wanted.real.dtype)
    nan = np.isnan(wanted)
    return bool((np.isnan(found) == nan).all()) and bits(found[~nan]) == bits(wanted[~nan])


def _close(found: Array, wanted: Array) -> bool:
    if found.dtype == oracle.COMPLEX32:
        found, wanted = found.view(np.float16), wanted.view(np.float16)
    tolerance = 100 * float(ml_dtypes.finfo(found.dtype).eps)  # type: ignore[no-untyped-call]
    if found.dtype.kind == "c":
        found, wanted = found.view(found.real.dtype), wanted.view(wanted.real.dtype)
    wide = np.longdouble
    return found.dtype == wanted.dtype and np.allclose(
        found.astype(wide), wanted.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True
    )


_reduced: dict[Any, tuple[Array, Any]] = {}
"""Reductions by the identities of what they are of, which is kept with them: ranks of one process share them."""
ops_of = functools.cache(lambda dtype: sorted(op.name for op in oracle.ops_of(DTYPES[dtype])))
"""The names of the operations that are defined for an element type, but PREMUL_SUM."""
_COMPARED = {"special": _equal_but_nan, "special, roughly": _close, "rounded": _close}
