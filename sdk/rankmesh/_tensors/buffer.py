"""Buffer: the elements of one tensor, in memory that a collective can read or write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from rankmesh._tensors.layout import Array, Layout, WriteBack, refuse_overlap, supported, type_name
from rankmesh_agent.wire.dtypes import zero_padding

_HOST_DEVICES = frozenset((1, 3, 11))
"""DLPack device types in host memory: CPU, pinned for CUDA, pinned for ROCm."""

_PADDED_ITEMSIZE = 16
"""Bytes from which an element may have padding: that of longdouble."""


class Buffer(ABC):
    """Elements of a tensor that a user passed."""

    __slots__ = ("name", "tensor")

    def __init__(self, tensor: Any, name: str) -> None:
        self.tensor = tensor
        self.name = name

    @staticmethod
    def device_of(tensor: Any) -> int | None:
        """Return the number of the GPU that holds a tensor of this kind, None for host memory."""
        return None

    @abstractmethod
    def host_array(self) -> tuple[Array, WriteBack | None]:
        """Return the elements as a NumPy array of any layout, and the function that writes changes back to a tensor.

        The array shares the tensor's memory, and there is nothing to write back, wherever that is possible; it is
        read-only if the tensor must not be written.

        Raises:
            TypeError: the object is not an array of numbers, or is on a device other than a CPU or an NVIDIA GPU.
            ValueError: its memory was freed or closed.
        """

    def device_array(self) -> tuple[Any, WriteBack | None]:
        """Return the elements as a contiguous DeviceArray, and the function that writes a staged copy back.

        Raises:
            TypeError: the tensor is in host memory, or its elements cannot be communicated.
            ValueError: its storage was freed.
        """
        raise TypeError(
            f"{self.name} is a {type_name(self.tensor)} in host memory, but another array of the call is on a GPU: "
            "all arrays of a call have to be on one GPU, or all in host memory"
        )

    def dtype(self) -> np.dtype[Any]:
        """Return the element type of a tensor on a GPU."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """Return the layout of the tensor itself, for one whose ``host_array`` is a copy."""
        raise NotImplementedError

    def flat_in(self, on_device: bool = False) -> Array:
        """Return the elements to be sent: one-dimensional and contiguous; a copy only if the tensor's are not."""
        if on_device:
            device_array: Array = self.device_array()[0]
            return device_array
        array, _ = self.host_array()
        flat = np.ascontiguousarray(array, supported(array.dtype, self.name)).reshape(-1)
        return flat if flat.itemsize < _PADDED_ITEMSIZE else zero_padding(flat)

    def flat_out(self, on_device: bool = False) -> tuple[Array, WriteBack | None]:
        """Return contiguous memory for a result, holding the tensor's elements, and what copies it to the tensor.

        Args:
            on_device: return a DeviceArray.

        Returns:
            The array, and None if it shares the tensor's memory.

        Raises:
            ValueError: the tensor is read-only, or some of its elements share memory.
        """
        array, write_back = self.device_array() if on_device else self.host_array()
        if write_back is not None:  # the array is a copy, in which each element has memory of its own
            refuse_overlap(self.layout(), self.name)
        if on_device:
            return array, write_back
        native, flags = supported(array.dtype, self.name), array.flags
        if not flags.writeable:
            raise ValueError(
                f"{self.name} is read-only, and the operation writes to it; pass a writable copy: "
                f"numpy.array({self.name})"
            )
        if flags.c_contiguous and array.dtype == native:
            flat = array.reshape(-1)
            return flat if flat.itemsize < _PADDED_ITEMSIZE else zero_padding(flat), write_back
        refuse_overlap(Layout(array.shape, array.strides, array.itemsize), self.name)
        staged = np.ascontiguousarray(array, native)

        def copy_back() -> None:
            array[...] = staged.reshape(array.shape)
            if write_back is not None:
                write_back()

        return zero_padding(staged.reshape(-1)), copy_back


class NumpyBuffer(Buffer):
    """Elements of a NumPy array."""

    __slots__ = ()

    def host_array(self) -> tuple[Array, None]:
        if isinstance(self.tensor, np.ma.MaskedArray):
            raise TypeError(
                f"{self.name} is a masked array, whose mask would be lost; pass {self.name}.filled() or "
                f"{self.name}.data"
            )
        return np.asarray(self.tensor), None  # a subclass, such as np.matrix, may define shapes of its own


class ExportedBuffer(Buffer):
    """Elements of an object that exports a buffer, CPU DLPack, or (to be read only) ``__array__``."""

    __slots__ = ()

    def host_array(self) -> tuple[Array, None]:
        tensor, name, reason = self.tensor, self.name, ""
        try:
            return np.asarray(memoryview(tensor)), None
        except (TypeError, BufferError):
            pass  # no buffer, or one of a dtype for which the buffer protocol has no code, such as bfloat16
        except ValueError as error:
            raise ValueError(f"{name}, a {type_name(tensor)}, cannot be read: {error}") from error
        if hasattr(type(tensor), "__dlpack_device__"):
            device = tensor.__dlpack_device__()[0]
            if device not in _HOST_DEVICES:
                raise TypeError(
                    f"{name} is a {type_name(tensor)} on DLPack device {getattr(device, 'name', device)}: only arrays "
                    "in host memory can be communicated; pass a copy on the CPU"
                )
            try:
                return np.from_dlpack(tensor), None
            except (BufferError, RuntimeError) as error:
                reason = f" ({error})"  # most often a dtype that NumPy does not accept this way
        if hasattr(type(tensor), "__array__"):
            array = np.asarray(tensor).view()
            array.flags.writeable = False  # this may be a copy
            return array, None
        raise TypeError(
            f"{name} must be a NumPy array, a CPU torch tensor, or something that exports a buffer or CPU DLPack, "
            f"got {type_name(tensor)}{reason}; convert it with numpy.asarray()"
        )
