"""TorchBuffer: the elements of a torch tensor, in host memory or on a GPU. It never imports torch itself."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from rankmesh._tensors.buffer import Buffer
from rankmesh._tensors.layout import Array, Layout, WriteBack, type_name
from rankmesh_agent.wire.dtypes import FROM_NAME


class TorchBuffer(Buffer):
    """Elements of a torch tensor. Autograd records nothing of a collective, as in torch."""

    __slots__ = ()

    @staticmethod
    def device_of(tensor: Any) -> int | None:
        return int(tensor.device.index) if tensor.is_cuda else None

    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype(sys.modules["torch"], self.tensor.dtype)[0]

    def layout(self) -> Layout:
        size = self.tensor.element_size()
        return Layout(tuple(self.tensor.shape), tuple(step * size for step in self.tensor.stride()), size)

    def host_array(self) -> tuple[Array, WriteBack | None]:
        torch = sys.modules["torch"]
        plain = self._plain(torch)
        if plain.is_cuda:
            return self._staged(torch, plain)
        if not (plain.is_conj() or plain.is_neg()):
            return self._shared(torch, plain), None
        # A conjugated or negated view differs from its memory by a flag in torch: the numbers exist in a copy only.
        resolved = plain.resolve_conj().resolve_neg().contiguous()
        return self._shared(torch, resolved), lambda: plain.copy_(resolved)

    def device_array(self) -> tuple[Any, WriteBack | None]:
        if not self.tensor.is_cuda:
            return super().device_array()
        from rankmesh_agent.device.array import DeviceArray, TorchStreams

        torch = sys.modules["torch"]
        plain = self._plain(torch)
        self._refuse_freed(plain)
        write_back: WriteBack | None = None
        if plain.is_conj() or plain.is_neg() or not plain.is_contiguous():
            whole, plain = plain, plain.resolve_conj().resolve_neg().contiguous()
            write_back = functools.partial(whole.copy_, plain)
        dtype, device = numpy_dtype(torch, plain.dtype)[0], plain.device.index
        return DeviceArray(plain.data_ptr(), plain.numel(), dtype, device, plain, TorchStreams(torch)), write_back

    def _plain(self, torch: Any) -> Any:
        """Return the tensor without its autograd history."""
        tensor, name = self.tensor, self.name
        if tensor.is_meta:
            raise TypeError(f"{name} is a torch tensor on device meta, which has no data to communicate")
        if not (tensor.is_cpu or tensor.is_cuda):
            raise TypeError(
                f"{name} is a torch tensor on device {tensor.device}: only tensors in host memory, or on NVIDIA GPUs, "
                f"can be communicated; pass one on the CPU, for example {name}.cpu()"
            )
        if tensor.is_quantized:
            raise TypeError(f"{name} is a quantized torch tensor, whose scale would be lost; pass {name}.int_repr()")
        if tensor.is_nested:
            raise TypeError(f"{name} is a nested torch tensor; pass its tensors, {name}.unbind(), one by one")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} is a torch tensor of layout {tensor.layout}, not dense; pass {name}.to_dense()")
        return tensor.detach()

    def _refuse_freed(self, tensor: Any) -> None:
        # Before the data pointer is read: a view into a storage that was freed still has an address.
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise ValueError(f"{self.name} is a torch tensor whose storage was freed (resized to 0); allocate it first")

    def _shared(self, torch: Any, tensor: Any) -> Array:
        try:
            array = None if type(tensor) is torch.Tensor else _by_numpy(torch, tensor)
            self._refuse_freed(tensor)
            if array is not None:
                return array
            size = tensor.element_size()
            strides = None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride())
            return _by_pointer(torch, tensor, tuple(tensor.shape), strides)
        except (RuntimeError, TypeError) as error:
            raise TypeError(
                f"{self.name} is a {type_name(tensor)} whose memory cannot be shared ({error}); pass a plain "
                "torch.Tensor"
            ) from error

    def _staged(self, torch: Any, plain: Any) -> tuple[Array, WriteBack]:
        """Return a copy of a CUDA tensor in pinned memory; torch handles current stream and conjugated views."""
        self._refuse_freed(plain)
        host = torch.empty_like(plain, device="cpu", pin_memory=True)
        host.copy_(plain)
        array, _ = TorchBuffer(host, self.name).host_array()

        def write_back() -> None:
            plain.copy_(host)
            torch.cuda.current_stream(plain.device).synchronize()  # a caller that waits for the call reads no stream

        return array, write_back


def flat_array(torch: Any, tensor: Any) -> Array | None:
    """Return the memory of a dense, contiguous tensor on the CPU, one-dimensional; None for tensors of other kinds."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return None
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or not tensor.untyped_storage().nbytes():
        return None
    return _by_pointer(torch, tensor, (tensor.numel(),), None)


def _by_pointer(torch: Any, tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Array:
    """Return a tensor's memory as an array that keeps the tensor alive.

    Unlike an array of ``tensor.numpy()`` it does not forbid for good that the storage is resized: FSDP resizes the
    storage of gathered parameters.
    """
    dtype, typestr = numpy_dtype(torch, tensor.dtype)
    if not tensor.numel():
        return np.empty(shape, dtype)
    data = tensor.data_ptr(), False
    interface = {"version": 3, "data": data, "shape": shape, "strides": strides, "typestr": typestr}
    array = np.asarray(SimpleNamespace(__array_interface__=interface, tensor=tensor))
    return array if array.dtype is dtype else array.view(dtype)


def _by_numpy(torch: Any, tensor: Any) -> Array:
    carrier, dtype = _carrier(torch, tensor.dtype)
    array: Array = tensor.numpy() if carrier is None else tensor.view(carrier).numpy().view(dtype)
    return array


@functools.cache
def numpy_dtype(torch: Any, dtype: Any) -> tuple[np.dtype[Any], str]:
    """Return the NumPy dtype of a torch dtype, and the typestr of a dtype of that size that every NumPy knows."""
    found = _carrier(torch, dtype)[1]
    return found, found.str if found.isbuiltin == 1 and found.kind != "V" else f"|V{found.itemsize}"


@functools.cache
def _carrier(torch: Any, dtype: Any) -> tuple[Any, np.dtype[Any]]:
    """Return the torch dtype as which a dtype is passed to NumPy, None for itself, and its dtype there.

    Dtypes that neither NumPy nor ml_dtypes know (float4_e2m1fn_x2, int4, bits8, …) are opaque bytes.
    """
    try:
        return None, torch.empty(0, dtype=torch.uint8).view(dtype).numpy().dtype
    except TypeError:
        opaque = np.dtype(f"V{dtype.itemsize}")
        return getattr(torch, f"int{8 * dtype.itemsize}"), FROM_NAME.get(str(dtype).removeprefix("torch."), opaque)
