"""Layout of arrays in memory, the dtypes that can be communicated, and descriptions of tensors for errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.dtypes import FROM_CODE, display

Array = npt.NDArray[Any]
WriteBack = Callable[[], None]
"""Copies the elements of a staged copy back to the user's tensor."""

SUPPORTED = frozenset(FROM_CODE.values())
"""The dtypes that can be communicated, in this machine's byte order."""


class Layout(NamedTuple):
    """Position of an array's elements: the length of each dimension, and the bytes between neighbours in it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def supported(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """Return a dtype in this machine's byte order."""
    if dtype in SUPPORTED:
        return dtype
    if not dtype.isnative and (native := dtype.newbyteorder("=")) in SUPPORTED:
        return native
    raise TypeError(
        f"{name} has dtype {dtype}, which cannot be communicated: integers, floats, complex numbers and bool can, "
        "other elements as bytes, with .view(numpy.uint8), and objects with all_gather_object and the other object "
        "collectives"
    )


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of an object that exports a buffer."""
    shape = getattr(tensor, "shape", None)
    if shape is not None:
        return tuple(shape)
    with memoryview(tensor) as view:
        return view.shape or ()


def describe(tensor: Any) -> str:
    """Return dtype and shape, ``float32 (3, 4)``, or the type of an object that has none; never fails."""
    try:
        dtype = tensor.dtype if hasattr(tensor, "dtype") else np.asarray(memoryview(tensor)).dtype
        name = display(dtype) if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
        return f"{name} {shape_of(tensor)}"
    except (TypeError, ValueError, BufferError, RuntimeError):  # RuntimeError: torch, for example of nested tensors
        return type_name(tensor)


def type_name(obj: Any) -> str:
    """Return the full name of an object's type, for errors."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def refuse_overlap(layout: Layout, name: str) -> None:
    """Refuse to write to an array of which two elements share a byte."""
    if _overlaps(layout):
        raise ValueError(
            f"{name} has elements that share memory (it is expanded, or its strides overlap), and the operation writes "
            f"to it; pass a copy: numpy.array({name})"
        )


def _overlaps(layout: Layout) -> bool:
    if 0 in layout.shape:
        return False
    steps = sorted((abs(step), size) for step, size in zip(layout.strides, layout.shape, strict=True) if size > 1)
    reach = layout.itemsize
    for step, size in steps:
        if step < reach:
            break
        reach += step * (size - 1)
    else:
        return False  # each dimension steps over everything that the smaller steps reach
    if not steps[0][0]:
        return True
    addresses = np.zeros(1, np.int64)
    for step, size in steps:
        addresses = np.add.outer(addresses, np.arange(size) * step).reshape(-1)
    return bool((np.diff(np.sort(addresses)) < layout.itemsize).any())
