"""JSON text from another process, as plain data. Pure: this module performs no I/O."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_MAX_DIGITS = 20
"""Characters of a 64-bit integer, its sign included."""
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def loads(text: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text (RFC 8259): its numbers are finite, and integers have at most 64 bits.

    Raises:
        ValueError: the text is not JSON, not UTF-8, or nested too deep for the parser; or a number is out of range.
    """
    return _decode(_FINITE, text)


def loads_with_infinity(text: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text as ``loads`` does; a number may also be Infinity, as timeouts are.

    Raises:
        ValueError: see ``loads``.
    """
    return _decode(_INFINITE, text)


def _decode(decoder: json.JSONDecoder, text: bytes | bytearray | str) -> Any:
    try:
        return decoder.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) <= _MAX_DIGITS else _MOST + 1
    if not _LEAST <= number <= _MOST:
        raise ValueError("an integer in the JSON has more than 64 bits")
    return number


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("a number in the JSON is out of range")
    return number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _infinity_only(name: str) -> float:
    return math.inf if name == "Infinity" else _refuse(name)


_FINITE = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_refuse)
_INFINITE = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_infinity_only)
