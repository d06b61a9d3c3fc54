"""Array contents by which a result is known to be right: every element encodes its place and its rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray
Numbered = tuple[Array, float]
"""An array and the multiple of the pattern that it holds: a rank's number, or the sum of several."""

_PERIOD = 7
"""A prime, so that shards and chunks begin at different places of the pattern; small, so that 16 bits hold any sum."""
_TILE = np.arange(_PERIOD * 4096, dtype=np.float32) % _PERIOD


def fill(array: Any, number: float) -> None:
    """Write a multiple of the pattern, to an array in host memory or a CuPy array."""
    if not isinstance(array, np.ndarray):
        import cupy

        host = np.empty(array.shape, array.dtype)
        fill(host, number)
        array[...] = cupy.asarray(host)
        return
    for part, tile in _parts(array, number):
        part[...] = tile


def difference(array: Any, number: float) -> str | None:
    """Return a description of the first element that is not this multiple of the pattern, None if all are."""
    array, begin = array if isinstance(array, np.ndarray) else array.get(), 0
    for part, tile in _parts(array, number):
        different = part != tile
        if different.any():
            first = int(different.argmax())
            return f"element {begin + first} of {array.size} is {part[first]}, not {tile[first]}"
        begin += part.size
    return None


def _parts(array: Array, number: float) -> Iterator[tuple[Array, Array]]:
    tile = (1 + _TILE).astype(array.dtype) * array.dtype.type(number)
    for begin in range(0, array.size, tile.size):
        part = array[begin : begin + tile.size]
        yield part, tile[: part.size]
