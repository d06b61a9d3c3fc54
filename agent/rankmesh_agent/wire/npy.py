"""The .npy format, read from and written to memory: arrays that come over HTTP are not unpickled and not copied.

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
"""What every .npy file begins with."""
MAX_HEADER = 4096
"""Longest header that is looked at, in bytes: it is a Python literal, and one of an array is some 100 long."""
_SUPPORTED = frozenset(FROM_CODE.values())
_LENGTHS = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
"""How long the header is, by the format's version."""
_CUSTOM = 256
"""From this number on element types are not NumPy's own, and others that read the file do not know them."""
_KEYS = {"descr", "fortran_order", "shape"}
_INVALID = (ValueError, TypeError, KeyError, SyntaxError, OverflowError, RecursionError, MemoryError)
"""What is raised at literals that are none, and at descriptions of no dtype and no shape."""


class Header(NamedTuple):
    """What a .npy file says of its array.

    Attributes:
        dtype: element type, in the byte order of the file.
        shape: lengths of the dimensions.
        fortran: whether the first index runs fastest.
        offset: where the elements begin.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


def read_header(body: memoryview) -> Header:
    """Return what a .npy file says of its array.

    Raises:
        ValueError: it is no .npy file, or its header makes no sense.
    """
    if bytes(body[:6]) != MAGIC or len(body) < 12:
        raise ValueError("not a .npy file: it does not begin with \\x93NUMPY and a header")
    length = _LENGTHS.get(body[6])
    if length is None:
        raise ValueError(f"version {body[6]} of the .npy format is not known")
    begin = 8 + length.size
    (size,) = length.unpack(body[8:begin])
    if size > min(MAX_HEADER, len(body) - begin):
        raise ValueError(f"the .npy header is said to be {size} bytes long: more than there are, or than {MAX_HEADER}")
    try:
        fields = ast.literal_eval(bytes(body[begin : begin + size]).decode())
        if not isinstance(fields, dict) or set(fields) != _KEYS:
            raise ValueError("it must have descr, fortran_order and shape")
        shape, fortran = fields["shape"], fields["fortran_order"]
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("the shape is none")
        if not isinstance(fortran, bool):
            raise ValueError("fortran_order must be True or False")
        dtype = np.lib.format.descr_to_dtype(fields["descr"])
    except _INVALID as error:
        reason = str(error)[:200] or type(error).__name__
        raise ValueError(f"the .npy header cannot be read: {reason}") from None
    return Header(dtype, shape, fortran, begin + size)


def read(body: Array, named: np.dtype[Any] | None = None) -> Array:
    """Return the array of a .npy file in C order and this machine's byte order: a view of ``body`` if it can be one.

    Args:
        body: the file's bytes, uint8.
        named: the element type where the file cannot say it: NumPy knows those of ml_dtypes as so many bytes.

    Raises:
        ValueError: it is no .npy file, it holds another number of elements than its header says, or ``named`` is not
            what it may be read as.
        TypeError: its elements cannot be communicated (objects, strings, dates).
    """
    header = read_header(body.data)
    dtype = header.dtype
    native = native_of(dtype)
    expected = math.prod(header.shape) * dtype.itemsize
    if body.nbytes - header.offset != expected:
        raise ValueError(
            f"the .npy header says {display(native)}{list(header.shape)}, {expected} bytes, but "
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
    """Return what stands before the elements of a C-contiguous array in a .npy file."""
    out = io.BytesIO()
    dtype = array.dtype
    described = np.lib.format.dtype_to_descr(dtype) if dtype.num < _CUSTOM else f"|V{dtype.itemsize}"
    np.lib.format.write_array_header_1_0(out, {"descr": described, "fortran_order": False, "shape": tuple(array.shape)})
    return out.getvalue()


def native_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return an element type that can be communicated in this machine's byte order.

    Raises:
        TypeError: arrays of it cannot be communicated.
    """
    native = dtype if dtype in _SUPPORTED else dtype.newbyteorder("=")
    if native not in _SUPPORTED:
        raise TypeError(f"arrays of dtype {dtype} cannot be communicated; supported are {', '.join(FROM_NAME)}")
    return native
