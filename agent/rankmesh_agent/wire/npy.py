"""The .npy format in memory: the module reads arrays from HTTP bodies without pickle and without a copy.

The format is NumPy's: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.dtypes import FROM_CODE, FROM_NAME, OPAQUE, display

Array = npt.NDArray[Any]

MAGIC = np.lib.format.MAGIC_PREFIX
MAX_HEADER = 4096
"""Maximum bytes of a header: it is a Python literal, and that of an array has some 100."""
_SUPPORTED = frozenset(FROM_CODE.values())
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""By the format's version; NumPy writes version 3 for names of fields alone, and these cannot be communicated."""
_LONGEST_PREFIX = 12
"""Bytes before the header."""
_CUSTOM = 256
"""First type number of element types that are not NumPy's own, which other readers of the file do not know."""


def read(body: Array, named: np.dtype[Any] | None = None) -> Array:
    """Return the array of a .npy file in C order and this machine's byte order: a view of ``body`` if possible.

    Args:
        named: element type of the result, if the file cannot express it: NumPy stores ml_dtypes' types as opaque bytes.

    Raises:
        ValueError: the bytes are no .npy file, or of another number than the header's; or ``named`` does not fit them.
        TypeError: the elements cannot be communicated (objects, strings, dates).
    """
    file = io.BytesIO(body[: MAX_HEADER + _LONGEST_PREFIX].data)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _READERS:
            raise ValueError(f"version {version[0]} of the format is not known")
        shape, fortran, dtype = _READERS[version](file, max_header_size=MAX_HEADER)
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("the shape must be a tuple of lengths")
    except Exception as error:  # NumPy's parser raises many kinds
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"the .npy header cannot be read: {reason}") from None
    native = native_of(dtype)
    elements, expected = body[file.tell() :], math.prod(shape) * dtype.itemsize
    if elements.nbytes != expected:
        raise ValueError(
            f"the .npy header declares {display(native)}{list(shape)}, {expected} bytes, but {elements.nbytes} bytes "
            "follow it"
        )
    try:
        found = elements.view(dtype).reshape(shape, order="F" if fortran else "C")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"no array has the shape {list(shape)}: {error}") from None
    found = np.require(found, native, ["C", "A"])
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
    """Return the same element type in this machine's byte order; raise TypeError if it cannot be communicated."""
    native = dtype if dtype in _SUPPORTED else dtype.newbyteorder("=")
    if native not in _SUPPORTED:
        raise TypeError(f"arrays of dtype {dtype} cannot be communicated; supported are {', '.join(FROM_NAME)}")
    return native
