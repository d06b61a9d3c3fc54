"""Contents by which a result is known to be right: every element says where it is and whose it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Array = np.ndarray
Numbered = tuple[Array, float]
"""An array and the number its pattern is multiplied by: a rank's, or the sum of several."""

_PERIOD = 7
"""A prime, so that shares and chunks begin at different places of the pattern; small, so that 16 bits hold any sum."""
_TILE = np.arange(_PERIOD * 4096, dtype=np.float32) % _PERIOD


def fill(array: Array, number: float) -> None:
    """Write the pattern times a number."""
    for part, tile in _parts(array, number):
        part[...] = tile


def wrong(array: Array, number: float) -> str | None:
    """Say how an array differs from the pattern times a number; None if it does not."""
    begin = 0
    for part, tile in _parts(array, number):
        different = part != tile
        if different.any():
            first = int(np.argmax(different))
            return f"element {begin + first} of {array.size} is {part[first]}, not {tile[first]}"
        begin += part.size
    return None


def _parts(array: Array, number: float) -> Iterator[tuple[Array, Array]]:
    tile = (1 + _TILE).astype(array.dtype) * array.dtype.type(number)
    for begin in range(0, array.size, tile.size):
        part = array[begin : begin + tile.size]
        yield part, tile[: part.size]
