"""From what users pass to what the engine moves: one-dimensional, contiguous arrays of a supported dtype."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from rankmesh._tensors.containers import Array, Layout, Store, kind_of, layout_of, memory
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.wire.dtypes import FROM_CODE, display

SUPPORTED = frozenset(FROM_CODE.values())


def source(tensor: Any, name: str, comm: Communicator | None = None) -> Array:
    """Return the elements of ``tensor`` to be sent; a copy where they are not contiguous, or on a GPU.

    Args:
        tensor: what _containers.memory takes, of any shape.
        name: the argument's name, for errors.
        comm: who makes the call; where they work on GPUs the elements are a DeviceArray, on the tensor's.

    Raises:
        TypeError, ValueError: it is nothing whose elements can be communicated.
    """
    if type(tensor) is np.ndarray and tensor.dtype in SUPPORTED:
        array: Array = tensor
        if array.ndim == 1 and array.flags.c_contiguous:
            return array
    elif comm is not None and comm.on_device:
        elements, _ = _on_device(tensor, name)
        return elements
    else:
        array, _ = memory(tensor, name)
    # A copy exactly where the elements do not lie in order, in this machine's byte order.
    return np.ascontiguousarray(array, supported(array.dtype, name)).reshape(-1)


def destination(tensor: Any, name: str, comm: Communicator | None = None) -> tuple[Array, Store | None]:
    """Return memory for the elements of ``tensor``, holding them, and what copies it back where it is not their own.

    Args:
        tensor: what _containers.memory takes, of any shape, writable.
        name: the argument's name, for errors.
        comm: see source.

    Raises:
        TypeError: it is nothing whose elements can be communicated.
        ValueError: it is read-only, or some of its elements share memory.
    """
    if type(tensor) is np.ndarray and tensor.dtype in SUPPORTED:
        array: Array = tensor
        store: Store | None = None
        native = array.dtype
    elif comm is not None and comm.on_device:
        _, own = found = _on_device(tensor, name)
        if own is not None:
            _refuse_shared(layout_of(tensor), name)
        return found
    else:
        array, store = memory(tensor, name)
        if store is not None:  # the array is a copy, in which each element has memory of its own
            _refuse_shared(layout_of(tensor), name)
        native = supported(array.dtype, name)
    flags = array.flags
    if not flags.writeable:
        raise ValueError(
            f"{name} is read-only, and the operation writes to it; pass a writable copy: numpy.array({name})"
        )
    if flags.c_contiguous and array.dtype is native:
        return (array if array.ndim == 1 else array.reshape(-1)), store
    _refuse_shared(Layout(array.shape, array.strides, array.itemsize), name)
    staged = np.ascontiguousarray(array, native)

    def copy_back() -> None:
        array[...] = staged.reshape(array.shape)
        if store is not None:
            store()

    return staged.reshape(-1), copy_back


def overlap(array: Array, other: Array) -> bool:
    """Whether two arrays of ``source`` or ``destination`` may share memory."""
    if isinstance(array, np.ndarray):
        return np.may_share_memory(array, other)
    return array.overlaps(other)


def _on_device(tensor: Any, name: str) -> tuple[Array, Store | None]:
    from rankmesh._tensors import cuda

    array, store = cuda.array_of(tensor, name)
    return cast(Array, array), store  # as much of one as whoever works on GPUs needs


def supported(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """Return a dtype in this machine's byte order.

    Raises:
        TypeError: arrays of it cannot be communicated.
    """
    if dtype in SUPPORTED:
        return dtype
    native = dtype.newbyteorder("=")
    if native in SUPPORTED:
        return native
    raise TypeError(
        f"{name} has dtype {dtype}, which cannot be communicated: integers, floats, complex numbers and bool can, "
        "other elements as bytes, with .view(numpy.uint8), and objects with all_gather_object and its kin"
    )


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of anything ``source`` takes.

    Raises:
        TypeError: it has none.
    """
    shape = getattr(tensor, "shape", None)
    if shape is not None:
        return tuple(shape)
    with memoryview(tensor) as view:
        return view.shape or ()


def describe(tensor: Any) -> str:
    """Return dtype and shape in words, ``float32 (3, 4)``, or the type of what has none; never fails."""
    try:
        dtype = tensor.dtype if hasattr(tensor, "dtype") else np.asarray(memoryview(tensor)).dtype
        words = display(dtype) if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
        return f"{words} {shape_of(tensor)}"
    except (TypeError, ValueError, BufferError, RuntimeError):  # RuntimeError: torch's, of nested tensors say
        return kind_of(tensor)


def _refuse_shared(layout: Layout, name: str) -> None:
    if _overlaps(layout):
        raise ValueError(
            f"{name} has elements that share memory (it is expanded, or its strides overlap), and the operation writes "
            f"to it; pass a copy: numpy.array({name})"
        )


def _overlaps(layout: Layout) -> bool:
    """Tell whether two elements of an array share a byte."""
    if 0 in layout.shape:
        return False
    steps = sorted((abs(step), size) for step, size in zip(layout.strides, layout.shape, strict=True) if size > 1)
    reach = layout.itemsize
    for step, size in steps:
        if step < reach:
            break
        reach += step * (size - 1)
    else:
        return False  # each dimension steps over all that the smaller steps reach
    if not steps[0][0]:
        return True
    addresses = np.zeros(1, np.int64)
    for step, size in steps:
        addresses = np.add.outer(addresses, np.arange(size) * step).reshape(-1)
    return bool((np.diff(np.sort(addresses)) < layout.itemsize).any())
