"""From what users pass to what the engine moves: one-dimensional, contiguous arrays of a supported dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.dtypes import FROM_CODE

Array = npt.NDArray[Any]

_SUPPORTED = frozenset(FROM_CODE.values())


def source(tensor: Any, name: str) -> Array:
    """Return the elements of ``tensor`` to be sent; a copy where they are not contiguous.

    Raises:
        TypeError: it is not an array that can be communicated.
    """
    array = _checked(tensor, name)
    if array.ndim == 1 and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array).reshape(-1)  # a copy exactly where the elements do not lie in order


def destination(tensor: Any, name: str) -> tuple[Array, Callable[[], None] | None]:
    """Return memory for the elements of ``tensor``, holding them, and what copies it back where it is not their own.

    Raises:
        TypeError: it is not an array that can be communicated.
        ValueError: it is read-only.
    """
    array = _checked(tensor, name, writable=True)
    flags = array.flags
    if not flags.writeable:
        raise ValueError(f"{name} is read-only, and the operation writes to it; pass a copy: {name}.copy()")
    if flags.c_contiguous and array.dtype is getattr(tensor, "dtype", None):
        return (array if array.ndim == 1 else array.reshape(-1)), None
    staged = np.ascontiguousarray(array).reshape(-1)

    def copy_back() -> None:
        tensor[...] = staged.reshape(tensor.shape)

    return staged, copy_back


def _checked(tensor: Any, name: str, writable: bool = False) -> Array:
    if not isinstance(tensor, np.ndarray):
        raise TypeError(
            f"{name} must be a NumPy array, got {type(tensor).__module__}.{type(tensor).__qualname__}; "
            f"convert it with numpy.asarray()"
        )
    if isinstance(tensor, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled() or {name}.data")
    array: Array = np.asarray(tensor)  # a subclass, np.matrix say, may have its own idea of shapes
    if array.dtype in _SUPPORTED:
        return array
    native = array.dtype.newbyteorder("=")
    if native in _SUPPORTED:
        if writable and not array.flags.writeable:
            raise ValueError(f"{name} is read-only, and the operation writes to it; pass a copy: {name}.copy()")
        return array.astype(native)
    raise TypeError(
        f"{name} has dtype {array.dtype}, which cannot be communicated: integers, floats, complex numbers and bool can"
    )
