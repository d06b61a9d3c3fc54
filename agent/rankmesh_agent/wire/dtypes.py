"""NumPy's element types and their numbers on the wire."""

from __future__ import annotations

from typing import Any

import numpy as np

_NAMES: tuple[tuple[int, str], ...] = (
    (1, "bool"),
    (2, "int8"),
    (3, "int16"),
    (4, "int32"),
    (5, "int64"),
    (6, "uint8"),
    (7, "uint16"),
    (8, "uint32"),
    (9, "uint64"),
    (10, "float16"),
    (11, "float32"),
    (12, "float64"),
    (13, "longdouble"),
    (14, "complex64"),
    (15, "complex128"),
    (16, "clongdouble"),
)  # fmt: skip

NONE = 0
"""The code of a frame that carries no array."""

FROM_CODE: dict[int, np.dtype[Any]] = {code: np.dtype(name) for code, name in _NAMES}
"""Element type by wire code. Codes are never reused."""

# int64 and longlong are two type numbers of the same bytes: dtype equality makes them one key here.
_CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in FROM_CODE.items()}


def code_of(dtype: np.dtype[Any]) -> int:
    """Return the wire code of an element type in this machine's byte order.

    Raises:
        TypeError: the type has no code (objects, strings, dates, records).
    """
    try:
        return _CODES[dtype]
    except KeyError:
        supported = ", ".join(name for _, name in _NAMES)
        raise TypeError(f"arrays of dtype {dtype} cannot be communicated; supported are {supported}") from None


def name_of(code: int) -> str:
    """Return an element type's name for error messages, also when the code is not known here."""
    dtype = FROM_CODE.get(code)
    return str(dtype) if dtype is not None else f"dtype #{code}"
