"""Element types: their codes on the wire, their names, and the arithmetic that they support.

The types are NumPy's numbers and bool; bfloat16 and the float8 types of ml_dtypes; complex32, here a record of two
float16, as NumPy has no such type; and opaque bytes for element types without arithmetic: collectives copy them, but do
not reduce them.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Family = Literal["bool", "int", "float", "complex", "opaque"]

COMPLEX32: np.dtype[Any] = np.dtype([("real", np.float16), ("imag", np.float16)])

_TYPES: tuple[tuple[int, str, np.dtype[Any], Family], ...] = (
    (1, "bool", np.dtype("bool"), "bool"),
    (2, "int8", np.dtype("int8"), "int"),
    (3, "int16", np.dtype("int16"), "int"),
    (4, "int32", np.dtype("int32"), "int"),
    (5, "int64", np.dtype("int64"), "int"),
    (6, "uint8", np.dtype("uint8"), "int"),
    (7, "uint16", np.dtype("uint16"), "int"),
    (8, "uint32", np.dtype("uint32"), "int"),
    (9, "uint64", np.dtype("uint64"), "int"),
    (10, "float16", np.dtype("float16"), "float"),
    (11, "float32", np.dtype("float32"), "float"),
    (12, "float64", np.dtype("float64"), "float"),
    (13, "longdouble", np.dtype("longdouble"), "float"),
    (14, "complex64", np.dtype("complex64"), "complex"),
    (15, "complex128", np.dtype("complex128"), "complex"),
    (16, "clongdouble", np.dtype("clongdouble"), "complex"),
    (17, "bfloat16", np.dtype(ml_dtypes.bfloat16), "float"),
    (18, "float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), "float"),
    (19, "float8_e5m2", np.dtype(ml_dtypes.float8_e5m2), "float"),
    (20, "float8_e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz), "float"),
    (21, "float8_e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz), "float"),
    (22, "float8_e8m0fnu", np.dtype(ml_dtypes.float8_e8m0fnu), "float"),
    (23, "complex32", COMPLEX32, "complex"),
    (24, "opaque8", np.dtype("V1"), "opaque"),
    (25, "opaque16", np.dtype("V2"), "opaque"),
    (26, "opaque32", np.dtype("V4"), "opaque"),
    (27, "opaque64", np.dtype("V8"), "opaque"),
    (28, "opaque128", np.dtype("V16"), "opaque"),
)  # fmt: skip

PADDED = (np.longdouble, np.clongdouble) if np.finfo(np.longdouble).nmant == 63 else ()
"""Types whose elements contain padding bytes: 80-bit numbers in 16 bytes."""
_PADDED_ITEMSIZE = 16
"""Bytes of an x87 extended number, which has 10 bytes and 6 of padding; 0 where longdouble has another format."""

NONE = 0
"""The code of a frame without an array."""

FROM_CODE: dict[int, np.dtype[Any]] = {code: dtype for code, _, dtype, _ in _TYPES}
"""Element type by wire code. Codes are never reused."""

FROM_NAME: dict[str, np.dtype[Any]] = {name: dtype for _, name, dtype, _ in _TYPES}
"""Element type by its name in messages to users."""

OPAQUE: frozenset[np.dtype[Any]] = frozenset(dtype for _, _, dtype, family in _TYPES if family == "opaque")
"""Element types that collectives copy but do not reduce."""

UNPADDED = frozenset(dtype for dtype in FROM_CODE.values() if dtype.type not in PADDED)
"""Those whose elements can be sent as they are: a longdouble has padding bytes, which are zeroed before."""

WIDE: dict[np.dtype[Any], np.dtype[Any]] = {
    **{dtype: np.dtype(np.float32) for _, _, dtype, family in _TYPES if family == "float" and dtype.itemsize <= 2},
    COMPLEX32: np.dtype(np.complex64),
}
"""Accumulation dtype of each element type that is too narrow to accumulate in."""


class _Codes(dict[np.dtype[Any], int]):
    def __missing__(self, dtype: np.dtype[Any]) -> int:
        """Raise the error of objects, strings, dates and records."""
        raise TypeError(f"arrays of dtype {dtype} cannot be communicated; supported are {', '.join(FROM_NAME)}")


# int64 and longlong are two type numbers of the same bytes: dtype equality makes them one key here.
_CODES = _Codes({dtype: code for code, _, dtype, _ in _TYPES})
_NAMES: dict[np.dtype[Any], str] = {dtype: name for _, name, dtype, _ in _TYPES}
_FAMILIES: dict[np.dtype[Any], Family] = {dtype: family for _, _, dtype, family in _TYPES}


code_of = _CODES.__getitem__
"""Returns the wire code of an element type in this machine's byte order; raises a TypeError for one without a code."""


def family(dtype: np.dtype[Any]) -> Family:
    """Return the kind of arithmetic of an element type; ``dtype.kind`` does not distinguish the types of ml_dtypes."""
    return _FAMILIES[dtype]


def display(dtype: np.dtype[Any]) -> str:
    """Return the name of an element type for messages: ``float32``, ``bfloat16``, ``complex32``, ``opaque8``."""
    return _NAMES.get(dtype) or str(dtype)


def name_of(code: int) -> str:
    """Return the name of an element type for messages; accepts unknown codes."""
    dtype = FROM_CODE.get(code)
    return display(dtype) if dtype is not None else f"dtype #{code}"


def zero_padding(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a one-dimensional, contiguous array with zeroed padding bytes: the array itself if it is writable.

    Only longdouble and clongdouble have padding. NumPy leaves it uninitialised, so a send would disclose memory of this
    process.
    """
    if array.dtype.type not in PADDED:
        return array
    if not array.flags.writeable:
        array = array.copy()
    array.view(np.uint8).reshape(-1, _PADDED_ITEMSIZE)[:, 10:] = 0
    return array
