"""float16 to float32 and back, and sums of float16, bit for bit as NumPy makes them, in less than half of the time.

NumPy converts one element at a time (1.4 to 3 ns); these are its vector loops over pieces that stay in the cache. A
float16 whose bits are moved to the place of a float32's is 2**112 times too small, subnormal or not: *scaled*. Sums can
be made of scaled numbers, as nothing is lost: all are multiples of 2**-136, float32's last bit is worth 2**-149. One
multiplication makes them the numbers they stand for. On the way back they are rounded first, by adding and subtracting
a number whose last bit is the last bit wanted. Pieces with infinity or NaN, or that become so, are left to NumPy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PIECE = 1 << 15
_FEW = 1 << 11
"""Elements that NumPy converts before a dozen vector loops have begun."""
_UP, _DOWN = np.float32(2.0**112), np.float32(2.0**-112)
_SIGN_AND_NUMBER = np.int32(0x8FFFE000 - (1 << 32))
"""The bits of a float32 that a float16 has: shifted there, its sign has been copied into the three between, too."""
_MAGNITUDE, _INFINITE = np.uint16(0x7FFF), 0x7C00
_EXPONENT = np.int32(0x7F800000)
_LEAST, _LEAST_SCALED = np.float32(2.0**-14), np.float32(2.0**-126)
"""The least normal float16: below it the last bit stays where it is."""
_MOST, _MOST_SCALED = (127 + 16) << 23, 31 << 23
"""The exponent's bits from 65536 on, which is infinite; what is rounded up to it becomes infinity as it is packed."""
_ROUNDING = np.int32((13 << 23) + (1 << 22))
"""Makes 2**e the number 1.5 * 2**(e + 13), whose last bit is worth 2**(e - 10)."""
_SIGN = np.int32(0x8000)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.numbers = np.empty((2, _PIECE), np.float32)
        self.words = np.empty(_PIECE, np.int32)
        self.halves = np.empty(_PIECE, np.uint16)


_scratch = _Scratch()


def widen(halves: Array, out: Array) -> None:
    """Convert contiguous float16 to as many float32."""
    if halves.size < _FEW:
        out[:] = halves
        return
    for begin in range(0, halves.size, _PIECE):
        piece, wide = halves[begin : begin + _PIECE], out[begin : begin + _PIECE]
        if _unpack(piece, wide):
            np.multiply(wide, _UP, out=wide)
        else:
            wide[:] = piece


def narrow(wide: Array, out: Array) -> None:
    """Round contiguous float32 to as many float16, half to even; ``wide`` is used as scratch."""
    if out.size < _FEW:
        out[:] = wide
        return
    for begin in range(0, out.size, _PIECE):
        piece, halves = wide[begin : begin + _PIECE], out[begin : begin + _PIECE]
        if _round(piece, _LEAST, _MOST):
            np.multiply(piece, _DOWN, out=piece)
            _pack(piece, halves)
        else:
            halves[:] = piece


def add(parts: Sequence[Array], out: Array, divisor: int = 1) -> None:
    """Add contiguous float16 arrays in order, in float32, divide, and round once.

    Args:
        parts: at least two, of one length.
        out: where the result goes; may be the first of them.
        divisor: a power of two, not above 2**13.
    """
    for begin in range(0, out.size, _PIECE):
        pieces = [part[begin : begin + _PIECE] for part in parts]
        halves = out[begin : begin + _PIECE]
        total, other = _scratch.numbers[:, : halves.size]
        easy = halves.size >= _FEW and _unpack(pieces[0], total)
        for piece in pieces[1:]:
            easy = easy and _unpack(piece, other)
            if not easy:
                break
            np.add(total, other, out=total)
        if easy:
            if divisor > 1:
                np.multiply(total, np.float32(1 / divisor), out=total)
            easy = _round(total, _LEAST_SCALED, _MOST_SCALED)
        if easy:
            _pack(total, halves)
            continue
        total[:] = pieces[0]
        for piece in pieces[1:]:
            np.add(total, piece, out=total)
        halves[:] = np.divide(total, np.float32(divisor), out=total)


def _unpack(halves: Array, out: Array) -> bool:
    """Make float16 scaled float32; return False if infinity or NaN is among them."""
    magnitudes = _scratch.halves[: halves.size]
    if np.bitwise_and(halves.view(np.uint16), _MAGNITUDE, out=magnitudes).max() >= _INFINITE:
        return False
    bits = out.view(np.int32)
    bits[:] = halves.view(np.int16)
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, _SIGN_AND_NUMBER, out=bits)
    return True


def _round(wide: Array, least: np.float32, most: int) -> bool:
    """Round to as many bits as a float16 has; return False, and do nothing, if that is infinity or NaN for some.

    The sign of what becomes zero is kept apart, for ``_pack``.
    """
    rounding = _scratch.numbers[1, : wide.size].view(np.int32)
    bits = wide.view(np.int32)
    np.bitwise_and(bits, _EXPONENT, out=rounding)
    if rounding.max() >= most:
        return False
    signs = _scratch.words[: wide.size]
    np.right_shift(bits, 16, out=signs)
    np.bitwise_and(signs, _SIGN, out=signs)
    rounder = rounding.view(np.float32)
    np.maximum(rounder, least, out=rounder)
    np.add(rounding, _ROUNDING, out=rounding)
    np.add(wide, rounder, out=wide)
    np.subtract(wide, rounder, out=wide)
    return True


def _pack(scaled: Array, out: Array) -> None:
    """Make scaled and rounded float32 float16, with the signs that ``_round`` kept."""
    bits = scaled.view(np.int32)
    np.right_shift(bits, 13, out=bits)
    np.bitwise_or(bits, _scratch.words[: out.size], out=bits)
    out.view(np.int16)[:] = bits  # the lower half of each
