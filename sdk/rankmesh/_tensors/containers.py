"""The memory behind what users pass as a tensor, as a NumPy array: nothing is copied that can be shared."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.dtypes import FROM_NAME

Array = npt.NDArray[Any]
Store = Callable[[], None]
"""Brings what was written to a copy to where it belongs."""

_HOST_DEVICES = frozenset((1, 3, 11))
"""DLPack's device types whose memory the CPU reads: CPU, pinned for CUDA, pinned for ROCm."""
_CUDA_DEVICES = frozenset((2, 13))
"""Those of NVIDIA's GPUs: a GPU's memory, and memory that the driver moves."""


class Layout(NamedTuple):
    """Where an array's elements lie: how many each dimension has, and the bytes from one to the next."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def memory(tensor: Any, name: str) -> tuple[Array, Store | None]:
    """Return an array of any layout over the elements of a container, read-only if they must not be written.

    Args:
        tensor: NumPy array; torch tensor; what exports a buffer (bytearray, array.array, mmap, ctypes array) or CPU
            DLPack; what NumPy can at least read (``__array__``); array on a GPU of NVIDIA's, which is copied.
        name: the argument's name, for errors.

    Returns:
        The array, and None where it shares the container's memory; else what stores the array's elements there.

    Raises:
        TypeError: it is none of these, is on another device, or is no plain array of numbers (sparse, quantized,
            masked).
        ValueError: its buffer was closed, or cannot be read.
    """
    if isinstance(tensor, np.ndarray):
        if isinstance(tensor, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled() or {name}.data")
        return np.asarray(tensor), None  # a subclass, np.matrix say, may have its own idea of shapes
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(tensor, torch.Tensor):
        refuse_not_dense(torch, tensor, name)
        return _staged(tensor, name) if tensor.is_cuda else _of_torch(torch, tensor, name)
    if on_cuda(tensor):
        return _staged(tensor, name)
    return _exported(tensor, name), None


def device_of(tensor: Any) -> int | None:
    """Return the number of the GPU of NVIDIA's that an array is on, None if it is on none."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return int(tensor.device.index) if tensor.is_cuda else None
    if not on_cuda(tensor):
        return None
    if hasattr(type(tensor), "__dlpack_device__"):
        return int(tensor.__dlpack_device__()[1])
    from rankmesh._tensors.cuda import as_cupy

    return int(as_cupy(tensor).device.id)


def layout_of(tensor: Any) -> Layout:
    """Return where the elements of a torch tensor, or of an array on a GPU, lie."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        size = tensor.element_size()
        return Layout(tuple(tensor.shape), tuple(step * size for step in tensor.stride()), size)
    from rankmesh._tensors.cuda import as_cupy

    array = as_cupy(tensor)
    return Layout(array.shape, array.strides, array.itemsize)


def on_cuda(tensor: Any) -> bool:
    """Whether an array that is no torch tensor is on a GPU of NVIDIA's."""
    kind = type(tensor)
    if hasattr(kind, "__dlpack_device__"):
        return tensor.__dlpack_device__()[0] in _CUDA_DEVICES
    return hasattr(kind, "__cuda_array_interface__")


def _staged(tensor: Any, name: str) -> tuple[Array, Store | None]:
    from rankmesh._tensors import cuda

    return cuda.staged(tensor, name)


def kind_of(tensor: Any) -> str:
    """Return the full name of an object's type, for errors."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _of_torch(torch: Any, tensor: Any, name: str) -> tuple[Array, Store | None]:
    plain = tensor.detach()  # as in torch, a collective is nothing that autograd sees
    if not (plain.is_conj() or plain.is_neg()):
        return _shared(torch, plain, name), None
    # A conjugated or negated view differs from its memory by a bit that torch keeps: the numbers exist in a copy only.
    resolved = plain.resolve_conj().resolve_neg().contiguous()
    return _shared(torch, resolved, name), lambda: plain.copy_(resolved)


def refuse_not_dense(torch: Any, tensor: Any, name: str) -> None:
    """Refuse a tensor that is no plain array of numbers.

    Raises:
        TypeError: it is sparse, quantized, nested, or on another device.
    """
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(
            f"{name} is a torch tensor on device {tensor.device}: only tensors in host memory, or on NVIDIA's GPUs, "
            f"can be communicated; pass one on the CPU, {name}.cpu() say"
        )
    if tensor.is_quantized:
        raise TypeError(f"{name} is a quantized torch tensor, whose scale would be lost; pass {name}.int_repr()")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested torch tensor; pass its tensors, {name}.unbind(), one by one")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is a torch tensor of layout {tensor.layout}, not dense; pass {name}.to_dense()")


def _shared(torch: Any, tensor: Any, name: str) -> Array:
    plain = type(tensor) is torch.Tensor
    try:
        array = None if plain else _through_numpy(torch, tensor)
        refuse_freed(tensor, name)
        return _lent(torch, tensor) if array is None else array
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"{name} is a {kind_of(tensor)} whose memory cannot be shared ({error}); pass a plain torch.Tensor"
        ) from error


def refuse_freed(tensor: Any, name: str) -> None:
    """Refuse a tensor without memory. Before that is looked at: a view into a storage that was freed has an address.

    Raises:
        ValueError: its storage was resized to 0.
    """
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} is a torch tensor whose storage was freed (resized to 0); allocate it first")


class _Lent:
    """A tensor's memory, for NumPy. Unlike ``tensor.numpy()`` it does not forbid for good that the storage is resized.

    FSDP resizes the storage of what it gathers.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, letters: str, itemsize: int) -> None:
        self._tensor = tensor  # as long as there is an array, there is its memory
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": None if tensor.is_contiguous() else tuple(step * itemsize for step in tensor.stride()),
            "typestr": letters,
        }


def _lent(torch: Any, tensor: Any) -> Array:
    dtype, letters = carried(torch, tensor.dtype)
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    return np.asarray(_Lent(tensor, letters, dtype.itemsize)).view(dtype)


def _through_numpy(torch: Any, tensor: Any) -> Array:
    carrier, dtype = _carrier(torch, tensor.dtype)
    found: Array = tensor.numpy() if carrier is None else tensor.view(carrier).numpy().view(dtype)
    return found


@functools.cache
def carried(torch: Any, dtype: Any) -> tuple[np.dtype[Any], str]:
    """Return what a torch dtype is to NumPy, and the letters of a dtype of that size that every NumPy knows."""
    found = _carrier(torch, dtype)[1]
    return found, found.str if found.isbuiltin == 1 and found.kind != "V" else f"|V{found.itemsize}"


@functools.cache
def _carrier(torch: Any, dtype: Any) -> tuple[Any, np.dtype[Any]]:
    """Return the torch dtype to pass a dtype to NumPy as, None if it is the same, and the dtype it has there.

    What neither NumPy nor ml_dtypes know (float4_e2m1fn_x2, int4, bits8, …) are opaque bytes.
    """
    try:
        return None, torch.empty(0, dtype=torch.uint8).view(dtype).numpy().dtype
    except TypeError:
        opaque = np.dtype(f"V{dtype.itemsize}")
        return getattr(torch, f"int{8 * dtype.itemsize}"), FROM_NAME.get(str(dtype).removeprefix("torch."), opaque)


def _exported(tensor: Any, name: str) -> Array:
    why = ""
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, BufferError):
        pass  # no buffer, or one of a dtype that buffers have no letter for, bfloat16 say
    except ValueError as error:
        raise ValueError(f"{name}, a {kind_of(tensor)}, cannot be read: {error}") from error
    if hasattr(type(tensor), "__dlpack_device__"):
        device = tensor.__dlpack_device__()[0]
        if device not in _HOST_DEVICES:
            where = getattr(device, "name", device)
            raise TypeError(
                f"{name} is a {kind_of(tensor)} on DLPack device {where}: only arrays in host memory can be "
                "communicated; pass a copy on the CPU"
            )
        try:
            return np.from_dlpack(tensor)
        except (BufferError, RuntimeError) as error:
            why = f" ({error})"  # a dtype that NumPy does not take this way, most often
    if hasattr(type(tensor), "__array__"):
        array = np.asarray(tensor).view()
        array.flags.writeable = False  # this may be a copy
        return array
    raise TypeError(
        f"{name} must be a NumPy array, a CPU torch tensor, or something that exports a buffer or CPU DLPack, "
        f"got {kind_of(tensor)}{why}; convert it with numpy.asarray()"
    )
