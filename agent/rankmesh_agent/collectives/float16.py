"""Conversions between float16 and float32, and sums of float16, bit for bit as in NumPy, in a fraction of its time.

NumPy converts one element at a time (1.4 to 3 ns); this module uses NumPy's vector loops over pieces that stay in the
cache. The bits of a float16, shifted to their place in a float32, are 2**112 times too small, subnormal or not: the
number is *scaled*. Sums of scaled numbers are exact: all are multiples of 2**-136, and the last bit of a float32 is
worth 2**-149. The module rounds them as integers, subnormal or not, and shifts their bits back. One multiplication
restores the unscaled numbers. Other float32 numbers are rounded before they are scaled: the module adds and subtracts a
number whose last bit is the last bit of the result. NumPy handles pieces that have, or whose sums have, infinity or
NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.dtypes import COMPLEX32, WIDE

Array = npt.NDArray[Any]

_HALF = np.dtype(np.float16)
_PIECE = 1 << 16
"""Elements: two pieces of float32 are half of a usual L2 cache, and the overhead of a NumPy call is small."""
_SMALL = 1 << 12
"""Elements that NumPy converts before a dozen vector loops have started."""
_UP, _DOWN = np.float32(2.0**112), np.float32(2.0**-112)
_SHIFT = np.int32(13)
_SIGN_AND_NUMBER = np.int32(0x8FFFE000 - (1 << 32))
"""The bits of a float32 that a float16 has; the arithmetic shift also copied the sign into the three bits between."""
_INFINITE = 0x7C00
_LARGEST = 2047 << 30
"""The largest float16, in the unit of ``_largest``."""
_TOO_LARGE = np.float32(65520 * 2.0**-112).view(np.int32)
"""Bits of the least scaled number that rounds to infinity."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
_BELOW_HALF = np.int32((1 << 12) - 1)
_SIGN_AND_LAST = np.int32(1 << 28 | 1)
"""The last bit of a scaled number shifted to float16's place, and the sign at the place of the float16's sign."""
_EXPONENT = np.int32(0x7F800000)
_SMALLEST_NORMAL = np.float32(2.0**-14)
"""The least normal float16: below it, the value of the last bit is constant."""
_INFINITE_EXPONENT = (127 + 16) << 23
"""Exponent bits of 65536, which is infinite as float16; numbers rounded up to it become infinity in the conversion."""
_ROUNDING = np.int32((13 << 23) + (1 << 22))
"""Changes 2**e to 1.5 * 2**(e + 13), whose last bit is worth 2**(e - 10)."""
_SIGN = np.int32(0x8000)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.numbers = np.empty((2, _PIECE), np.float32)


_scratch = _Scratch()


def widen(array: Array, out: Array | None = None) -> Array:
    """Convert an array to its accumulation dtype.

    Args:
        array: one-dimensional, contiguous, of a dtype in WIDE.
        out: destination, contiguous and of the same length; a new array by default.

    Returns:
        The array in its accumulation dtype.
    """
    if out is None:
        out = np.empty(array.size, WIDE[array.dtype])
    if array.dtype == _HALF:
        _widen_halves(array, out)
    elif array.dtype == COMPLEX32:
        _widen_halves(array.view(np.float16), out.view(np.float32))
    else:
        out[:] = array
    return out


def narrow(wide: Array, out: Array) -> None:
    """Round an array in its accumulation dtype to the narrow dtype of ``out``, which is contiguous and of equal length.

    This function may change ``wide``. The caller's ``numpy.errstate`` determines the report of overflow and NaN.
    """
    if out.dtype == _HALF:
        _narrow_halves(wide, out)
    elif out.dtype == COMPLEX32:
        _narrow_halves(wide.view(np.float32), out.view(np.float16))
    else:
        out[:] = wide


def _widen_halves(halves: Array, out: Array) -> None:
    """Convert contiguous float16 to float32."""
    if halves.size < _SMALL:
        out[:] = halves
        return
    for begin in range(0, halves.size, _PIECE):
        piece, wide = halves[begin : begin + _PIECE], out[begin : begin + _PIECE]
        if _largest(piece) is None:
            wide[:] = piece
        else:
            _unpack(piece, wide)
            np.multiply(wide, _UP, out=wide)


def _narrow_halves(wide: Array, out: Array) -> None:
    """Round contiguous float32 to float16, half to even; ``wide`` serves as scratch memory."""
    if out.size < _SMALL:
        out[:] = wide
        return
    for begin in range(0, out.size, _PIECE):
        piece, halves = wide[begin : begin + _PIECE], out[begin : begin + _PIECE]
        bits = piece.view(np.int32)
        rounding, signs = _scratch.numbers[:, : halves.size].view(np.int32)
        np.bitwise_and(bits, _EXPONENT, out=rounding)
        if rounding.max() >= _INFINITE_EXPONENT:
            halves[:] = piece
            continue
        np.right_shift(bits, 16, out=signs)  # separate: a number rounded to zero loses its sign
        np.bitwise_and(signs, _SIGN, out=signs)
        rounder = rounding.view(np.float32)
        np.maximum(rounder, _SMALLEST_NORMAL, out=rounder)
        np.add(rounding, _ROUNDING, out=rounding)
        np.add(piece, rounder, out=piece)
        np.subtract(piece, rounder, out=piece)
        np.multiply(piece, _DOWN, out=piece)
        np.right_shift(bits, _SHIFT, out=bits)
        np.bitwise_or(bits, signs, out=bits)
        halves.view(np.int16)[:] = bits  # the lower half of each


def add(parts: Sequence[Array], out: Array, divisor: int = 1) -> None:
    """Add contiguous float16 arrays in order, in float32, divide, and round once.

    Args:
        parts: at least two arrays of equal length.
        out: destination; may be one of ``parts``.
        divisor: a power of two, at most 2**13.
    """
    for begin in range(0, out.size, _PIECE):
        pieces = [part[begin : begin + _PIECE] for part in parts]
        halves = out[begin : begin + _PIECE]
        if halves.size < _SMALL or not _add_scaled(pieces, halves, divisor):
            total = _scratch.numbers[0, : halves.size]
            total[:] = pieces[0]
            for piece in pieces[1:]:
                np.add(total, piece, out=total)
            halves[:] = np.divide(total, np.float32(divisor), out=total)


def _add_scaled(pieces: Sequence[Array], out: Array, divisor: int) -> bool:
    """Add scaled numbers, as ``add`` does; return False, without an effect, if an input or a sum is infinite or NaN."""
    total, other = _scratch.numbers[:, : out.size]
    bound = 0
    wide = total
    for piece in pieces:
        largest = _largest(piece)
        if largest is None:
            return False
        bound += largest
        _unpack(piece, wide)
        if wide is other:
            np.add(total, other, out=total)
        wide = other
    if divisor > 1:
        np.multiply(total, np.float32(1 / divisor), out=total)
    bits, rest = total.view(np.int32), other.view(np.int32)
    if bound > divisor * _LARGEST and np.bitwise_and(bits, _MAGNITUDE, out=rest).max() >= _TOO_LARGE:
        return False
    # Half to even: add a half less the least bit, and the least bit too where the last bit of the result is set.
    np.right_shift(bits, _SHIFT, out=rest)
    np.bitwise_and(rest, _SIGN_AND_LAST, out=rest)
    np.add(bits, _BELOW_HALF, out=bits)
    np.add(bits, rest, out=bits)
    np.right_shift(bits, _SHIFT, out=bits)
    out.view(np.int16)[:] = bits  # the lower half of each
    return True


def _largest(halves: Array) -> int | None:
    """Return an upper bound of float16's magnitudes, in 2**-25, exact for normal ones; None for infinity and NaN."""
    positive = int(np.maximum.reduce(halves.view(np.int16)))
    either = int(np.maximum.reduce(halves.view(np.uint16)))  # a negative number, if there are any
    bits = max(positive, either & 0x7FFF)
    return None if bits >= _INFINITE else (1024 | bits & 1023) << (bits >> 10)


def _unpack(halves: Array, out: Array) -> None:
    """Convert finite float16 to scaled float32."""
    bits = out.view(np.int32)
    bits[:] = halves.view(np.int16)
    np.left_shift(bits, _SHIFT, out=bits)
    np.bitwise_and(bits, _SIGN_AND_NUMBER, out=bits)
