"""buffer_of: the buffer for each kind of tensor, and the shortcuts for NumPy arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from rankmesh._tensors.buffer import Buffer, ExportedBuffer, NumpyBuffer
from rankmesh._tensors.layout import Array, WriteBack
from rankmesh._tensors.torch_buffer import TorchBuffer
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.wire.dtypes import UNPADDED

_CUDA_DEVICES = frozenset((2, 13))
"""DLPack device types on NVIDIA GPUs: device memory, and managed memory."""
_known: dict[type, type[Buffer]] = {}
"""Buffers by types of which all arrays have the same: CuPy's, whose ``__dlpack_device__`` asks the driver each time."""


def buffer_of(tensor: Any, name: str) -> Buffer:
    """Return the buffer of a tensor.

    Args:
        tensor: NumPy array; torch tensor; CuPy array; object that exports a buffer (bytearray, array.array, mmap,
            ctypes array), DLPack, or ``__array__``.
    """
    return _kind_of(tensor)(tensor, name)


def _kind_of(tensor: Any) -> type[Buffer]:
    known = _known.get(type(tensor))
    if known is not None:
        return known
    if isinstance(tensor, np.ndarray):
        return NumpyBuffer
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    if torch is not None and isinstance(tensor, torch.Tensor):
        return TorchBuffer
    kind = type(tensor)
    if hasattr(kind, "__dlpack_device__"):
        on_cuda = tensor.__dlpack_device__()[0] in _CUDA_DEVICES
    else:
        on_cuda = hasattr(kind, "__cuda_array_interface__")
    if not on_cuda:
        return ExportedBuffer
    from rankmesh._tensors.cuda_buffer import CudaBuffer, CupyBuffer

    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(tensor, cupy.ndarray):
        return _known.setdefault(kind, CupyBuffer)
    return CudaBuffer


def device_of(tensor: Any) -> int | None:
    """Return the number of the NVIDIA GPU that holds a tensor, None for host memory."""
    return None if type(tensor) is np.ndarray else _kind_of(tensor).device_of(tensor)


def flat_in(tensor: Any, name: str, comm: Communicator | None = None) -> Array:
    """Return a tensor's elements to be sent: see Buffer.flat_in."""
    on_device = comm is not None and comm.on_device
    if type(tensor) is np.ndarray and not on_device:  # nearly all: without a Buffer
        array: Array = tensor
        if array.flags.c_contiguous and array.dtype in UNPADDED:
            return array if array.ndim == 1 else array.reshape(-1)
    return buffer_of(tensor, name).flat_in(on_device)


def flat_out(tensor: Any, name: str, comm: Communicator | None = None) -> tuple[Array, WriteBack | None]:
    """Return memory for a result, holding the tensor's elements, and what copies it back: see Buffer.flat_out."""
    on_device = comm is not None and comm.on_device
    if type(tensor) is np.ndarray and not on_device:  # nearly all: without a Buffer
        array: Array = tensor
        if array.flags.carray and array.dtype in UNPADDED:
            return array if array.ndim == 1 else array.reshape(-1), None
    return buffer_of(tensor, name).flat_out(on_device)


def overlap(array: Array, other: Array) -> bool:
    """Return whether two arrays of ``flat_in`` or ``flat_out`` may share memory."""
    if isinstance(array, np.ndarray):
        return np.may_share_memory(array, other)
    return array.overlaps(other)
