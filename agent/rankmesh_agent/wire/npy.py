"""The .npy format in memory: the module reads arrays from HTTP bodies without pickle and without a copy.

The format is NumPy's: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import io
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.dtypes import FROM_CODE, FROM_NAME, OPAQUE, display

Array = npt.NDArray[Any]

MAGIC = b"\x93NUMPY"
"""First bytes of every .npy file."""
MAX_HEADER = 4096
"""Maximum bytes of a header: it is a Python literal, and that of an array has some 100."""
_SUPPORTED = frozenset(FROM_CODE.values())
_LENGTHS = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
"""Layout of the header's length, by the format's version."""
_CUSTOM = 256
"""First type number of element types that are not NumPy's own, which other readers of the file do not know."""
_KEYS = {"descr", "fortran_order", "shape"}
_INVALID = (ValueError, TypeError, KeyError, SyntaxError, OverflowError, RecursionError, MemoryError)
"""Errors of invalid literals, and of descriptions that are no dtype or no shape."""


class Header(NamedTuple):
    """Header of a .npy file.

    Attributes:
        dtype: element type, in the byte order of the file.
        shape: lengths of the dimensions.
        fortran: whether the first index varies fastest.
        offset: start of the elements.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


def read_header(body: memoryview) -> Header:
    """Return the header of a .npy file.

    Raises:
        ValueError: the bytes are no .npy file, or the header is invalid.
    """
    if bytes(body[:6]) != MAGIC or len(body) < 12:
        raise ValueError("not a .npy file: it does not begin with \\x93NUMPY and a header")
    length = _LENGTHS.get(body[6])
    if length is None:
        raise ValueError(f"version {body[6]} of the .npy format is not known")
    begin = 8 + length.size
    (size,) = length.unpack(body[8:begin])
    if size > min(MAX_HEADER, len(body) - begin):
        raise ValueError(f"the .npy header declares {size} bytes: more than follow, or than {MAX_HEADER}")
    try:
        fields = ast.literal_eval(bytes(body[begin : begin + size]).decode())
        if not isinstance(fields, dict) or set(fields) != _KEYS:
            raise ValueError("it must have descr, fortran_order and shape")
        shape, fortran = fields["shape"], fields["fortran_order"]
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("the shape must be a tuple of lengths")
        if not isinstance(fortran, bool):
            raise ValueError("fortran_order must be True or False")
        dtype = np.lib.format.descr_to_dtype(fields["descr"])
    except _INVALID as error:
        reason = str(error)[:200] or type(error).__name__
        raise ValueError(f"the .npy header cannot be read: {reason}") from None
    return Header(dtype, shape, fortran, begin + size)


def read(body: Array, named: np.dtype[Any] | None = None) -> Array:
    """Return the array of a .npy file in C order and this machine's byte order: a view of ``body`` if possible.

    Args:
        body: bytes of the file, uint8.
        named: element type of the result, if the file cannot express it: NumPy stores ml_dtypes' types as opaque bytes.

    Raises:
        ValueError: the bytes are no .npy file, their number differs from the header's, or ``named`` does not fit the
            elements.
        TypeError: the elements cannot be communicated (objects, strings, dates).
    """
    header = read_header(body.data)
    dtype = header.dtype
    native = native_of(dtype)
    expected = math.prod(header.shape) * dtype.itemsize
    if body.nbytes - header.offset != expected:
        raise ValueError(
            f"the .npy header declares {display(native)}{list(header.shape)}, {expected} bytes, but "
            f"{body.nbytes - header.offset} bytes follow it"
        )
    shape = header.shape[::-1] if header.fortran else header.shape
    try:
        found = body[header.offset :].view(dtype).reshape(shape)
    except _INVALID as error:
        raise ValueError(f"no array has the shape {list(header.shape)}: {error}") from None
    if header.fortran:
        found = found.T
    if not found.flags.aligned or not found.flags.c_contiguous or dtype != native:
        found = np.array(found, native, order="C")
    if named is None or named == native:
        return found
    if native not in OPAQUE or named.itemsize != native.itemsize:
        raise ValueError(f"the .npy file holds {display(native)}, which cannot be read as {display(named)}")
    return found.view(named)


def header_of(array: Array) -> bytes:
    """Return the header of a .npy file with a C-contiguous array."""
    out = io.BytesIO()
    dtype = array.dtype
    described = np.lib.format.dtype_to_descr(dtype) if dtype.num < _CUSTOM else f"|V{dtype.itemsize}"
    np.lib.format.write_array_header_1_0(out, {"descr": described, "fortran_order": False, "shape": tuple(array.shape)})
    return out.getvalue()


def native_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the same element type in this machine's byte order.

    Raises:
        TypeError: arrays of the type cannot be communicated.
    """
    native = dtype if dtype in _SUPPORTED else dtype.newbyteorder("=")
    if native not in _SUPPORTED:
        raise TypeError(f"arrays of dtype {dtype} cannot be communicated; supported are {', '.join(FROM_NAME)}")
    return native
