"""Elements of a CuPy array, or of another object on a GPU. Imported when the first one is passed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rankmesh._tensors.buffer import Buffer
from rankmesh._tensors.layout import Array, Layout, WriteBack, supported, type_name
from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import CupyStreams, DeviceArray

_CUPY = CupyStreams()
_WIDEST_BITS = 8
"""Bytes of the widest unsigned integer."""


class CudaBuffer(Buffer):
    """Elements of an array on an NVIDIA GPU that exports CUDA's array interface or DLPack."""

    __slots__ = ()

    @staticmethod
    def device_of(tensor: Any) -> int | None:
        if hasattr(type(tensor), "__dlpack_device__"):
            return int(tensor.__dlpack_device__()[1])
        return int(runtime.cupy().asarray(tensor).device.id)

    def array(self) -> Any:
        """Return a CuPy array over the elements."""
        cupy, tensor = runtime.cupy(), self.tensor
        return cupy.asarray(tensor) if hasattr(type(tensor), "__cuda_array_interface__") else cupy.from_dlpack(tensor)

    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.array().dtype)
        return dtype

    def layout(self) -> Layout:
        array = self.array()
        return Layout(array.shape, array.strides, array.itemsize)

    def host_array(self) -> tuple[Array, WriteBack | None]:
        reason = runtime.unavailable_reason()
        if reason:
            raise TypeError(f"{self.name} is a {type_name(self.tensor)} on a GPU, which cannot be read: {reason}")
        array = self.array()
        bits = _bits(array)
        host = runtime.pinned_array(bits.size, bits.dtype).reshape(bits.shape)
        with runtime.DeviceGuard(bits.data.device_id):
            bits.get(out=host)

        def write_back() -> None:
            with runtime.DeviceGuard(bits.data.device_id):
                contiguous = bits if bits.flags.c_contiguous else runtime.cupy().empty(bits.shape, bits.dtype)
                contiguous.set(host)
                if contiguous is not bits:
                    bits[...] = contiguous
                runtime.synchronize_stream(runtime.current_stream())  # a caller that waits for the call reads no stream

        return host.view(np.dtype(array.dtype)), write_back

    def device_array(self) -> tuple[DeviceArray, WriteBack | None]:
        array = self.array()
        native = supported(np.dtype(array.dtype), self.name)
        if array.dtype != native:
            raise TypeError(
                f"{self.name} is in another byte order than this machine's: pass {self.name}.astype({native.name!r})"
            )
        write_back: WriteBack | None = None
        if not array.flags.c_contiguous:
            whole = _bits(array)
            with array.device:  # CuPy copies on the current device
                array = runtime.cupy().ascontiguousarray(whole)
            write_back = functools.partial(whole.__setitem__, ..., array.reshape(whole.shape))
        memory = array.data
        return DeviceArray(memory.ptr, array.size, native, memory.device_id, array, _CUPY), write_back


class CupyBuffer(CudaBuffer):
    """Elements of a CuPy array."""

    __slots__ = ()

    @staticmethod
    def device_of(tensor: Any) -> int | None:
        device: int = tensor.data.device_id
        return device

    def array(self) -> Any:
        return self.tensor


def _bits(array: Any) -> Any:
    """Return a view as unsigned integers, which CuPy can copy in any layout; of float8 it cannot."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= _WIDEST_BITS else array
