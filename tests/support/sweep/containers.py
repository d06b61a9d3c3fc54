"""The ways to hand elements to the API: every container and layout that NumPy and the standard library have."""

from __future__ import annotations

import array
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

_TYPECODES = {np.dtype(code): code for code in "qQbBhHiIlLfd"}


class Held(NamedTuple):
    """Elements in a container.

    Attributes:
        tensor: what the API gets.
        read: returns the elements as they are now, one-dimensional, in order.
        intact: whether what lies between and around the elements is as it was.
    """

    tensor: Any
    read: Callable[[], Array]
    intact: Callable[[], bool] = lambda: True


def _plain(elements: Array) -> Held:
    return _array(elements.copy())


def _part(elements: Array) -> Held:
    return _within(elements, (elements.size + 7,), np.s_[3 : 3 + elements.size])


def _strided(elements: Array) -> Held:
    return _within(elements, (3 * elements.size,), np.s_[1::3])


def _reversed(elements: Array) -> Held:
    return _within(elements, (elements.size,), np.s_[::-1])


def _transposed(elements: Array) -> Held:
    return _array(np.array(elements.reshape(_sides(elements.size)), order="F"))


def _block(elements: Array) -> Held:
    rows, columns = _sides(elements.size)
    return _within(elements, (rows + 2, columns + 3), np.s_[1:-1, 2:-1])


def _scalar(elements: Array) -> Held:
    return _array(elements.reshape(()).copy())


def _unaligned(elements: Array) -> Held:
    memory = bytearray(elements.nbytes + 2)
    array = np.frombuffer(memory, elements.dtype, elements.size, offset=1)
    array[:] = elements
    return Held(array, array.copy, lambda: memory[0] == memory[-1] == 0)


def _byteswapped(elements: Array) -> Held:
    return _array(elements.astype(elements.dtype.newbyteorder("S")))


def _bytearray(elements: Array) -> Held:
    memory = bytearray(elements.tobytes())
    return Held(memory, lambda: np.frombuffer(bytes(memory), elements.dtype))


def _array_array(elements: Array) -> Held:
    numbers = array.array(_TYPECODES[elements.dtype], elements.tolist())
    return Held(numbers, lambda: np.array(numbers, elements.dtype))


def _memoryview(elements: Array) -> Held:
    below = elements.copy()
    return Held(below.data, below.copy)


CONTAINERS: dict[str, Callable[[Array], Held]] = {
    "contiguous": _plain,
    "part": _part,
    "strided": _strided,
    "reversed": _reversed,
    "transposed": _transposed,
    "block": _block,
    "0-d": _scalar,
    "unaligned": _unaligned,
    "byteswapped": _byteswapped,
    "bytearray": _bytearray,
    "array.array": _array_array,
    "memoryview": _memoryview,
}
"""By name, what puts elements into such a container; it owns them."""


def _on_gpu(elements: Array) -> Held:
    return _within_on_gpu(elements.reshape(-1), elements.size, np.s_[:])


def _part_on_gpu(elements: Array) -> Held:
    return _within_on_gpu(elements, elements.size + 7, np.s_[3 : 3 + elements.size])


def _strided_on_gpu(elements: Array) -> Held:
    return _within_on_gpu(elements, 3 * elements.size, np.s_[1::3])


ON_GPUS: dict[str, Callable[[Array], Held]] = {
    "gpu": _on_gpu,
    "part on gpu": _part_on_gpu,
    "strided on gpu": _strided_on_gpu,
}
"""Those in a GPU's memory, of CuPy's; all arrays of a call are in such ones, or none."""

_NOT_FLAT = frozenset({"transposed", "block", "0-d"})


def fits(container: str, dtype: np.dtype[Any], count: int | None = None, *, flat: bool = False) -> bool:
    """Return whether a container can hold that many elements of a dtype, and with ``flat`` in one dimension."""
    standard = dtype.isbuiltin == 1
    return not (flat and container in _NOT_FLAT) and {
        "0-d": count is None or count == 1,
        "byteswapped": standard and dtype.itemsize > 1,
        "bytearray": dtype == np.uint8,
        "array.array": dtype in _TYPECODES,
        "memoryview": standard,
    }.get(container, True)


def hold(elements: Array, container: str) -> Held:
    """Return a copy of elements in a container, or in a plain array if they do not fit."""
    if container in ON_GPUS:
        return ON_GPUS[container](elements)
    return CONTAINERS[container if fits(container, elements.dtype, elements.size) else "contiguous"](elements)


def same(found: Array, wanted: Array) -> bool:
    """Return whether two arrays are equal bit for bit, but for the padding that long doubles have."""
    return found.dtype == wanted.dtype and bits(found) == bits(wanted)


def bits(elements: Array) -> bytes:
    """Return the bytes of an array that mean something."""
    if elements.dtype in (np.longdouble, np.clongdouble):  # another library's types may have the same characters
        return np.ascontiguousarray(elements).view(np.uint8).reshape(-1, 16)[:, :10].tobytes()
    return elements.tobytes()


def _array(array: Array) -> Held:
    native = array.dtype.newbyteorder("=")
    return Held(array, lambda: np.array(array, native).reshape(-1))


def _within(elements: Array, shape: tuple[int, ...], where: Any) -> Held:
    """Return elements as a part of a larger array."""
    whole = np.ones(shape, elements.dtype)
    array = whole[where]
    array[...] = elements.reshape(array.shape)
    before = whole.copy()

    def intact() -> bool:
        before[where] = array
        return same(whole, before)

    return Held(array, lambda: np.array(array).reshape(-1), intact)


def _within_on_gpu(elements: Array, size: int, where: slice) -> Held:
    """Return elements as a part of an array on a GPU, which is read as a whole, on the current stream."""
    import cupy

    whole = np.ones(size, elements.dtype)
    whole[where] = elements
    there = cupy.asarray(whole)

    def intact() -> bool:
        found = there.get()
        whole[where] = found[where]
        return same(found, whole)

    return Held(there[where], lambda: there.get()[where].copy(), intact)


def _sides(count: int) -> tuple[int, int]:
    """Return the sides of the squarest rectangle of that many elements."""
    if not count:
        return 0, 3
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return rows, count // rows
