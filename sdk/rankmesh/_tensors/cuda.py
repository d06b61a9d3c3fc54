"""Arrays on GPUs: who makes a group's calls on them, and what they are to the engine. Loaded when one comes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from rankmesh._session.backend import needs
from rankmesh._session.session import Group, ProcessGroup, communicator, require_world
from rankmesh._tensors.containers import Array, Store, kind_of, memory, on_cuda, refuse_freed, refuse_not_dense
from rankmesh._tensors.containers import carried as torch_dtype
from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.device.streams import CupyStreams, TorchStreams
from rankmesh_agent.gpu.communicator import GpuCommunicator
from rankmesh_agent.gpu.selection import GpuBackendSelector
from rankmesh_agent.gpu.store_exchange import StoreExchange
from rankmesh_agent.group.communicator import Communicator

_CUPY = CupyStreams()
_WIDEST_BITS = 8
"""Bytes of the widest unsigned integer."""


def collectives(group: Group, device: int) -> Communicator:
    """Return who makes a group's collectives on arrays on a GPU; the host's calls if they go through host memory.

    Raises:
        DistBackendError: the backend that was asked for cannot be used; says why.
        CollectiveTimeoutError: a rank did not come with an array on a GPU; names it.
    """
    choice = _choice(group)
    return communicator(group) if choice is None else choice.for_collectives(device)  # type: ignore[arg-type]


def messages(group: Group, device: int, peer: int | None) -> Communicator:
    """Return who carries arrays on a GPU to or from a group rank, or from any: see collectives.

    Raises:
        ValueError: it is to be received from any rank, and not through host memory.
    """
    choice = _choice(group)
    if peer is None and choice is not None:
        raise ValueError(
            "recv of an array on a GPU needs src: which way it comes depends on the sender. Backend 'gloo' takes "
            "all arrays through host memory, from any rank"
        )
    return communicator(group) if choice is None else choice.for_p2p(device, peer or 0)  # type: ignore[arg-type]


def over_several(group: Group, device: int) -> GpuCommunicator | None:
    """Return who makes collectives in which each rank has arrays on several GPUs; None for host memory."""
    choice = _choice(group)
    return None if choice is None else choice.for_multigpu(device)


def _choice(group: Group) -> GpuBackendSelector | None:
    """Return the group's choice of an engine; None if it was told to go through host memory."""
    world = require_world()
    made: ProcessGroup = world.group if group is None else group  # type: ignore[assignment]
    if made._engines.device == "host":
        return None
    if made._choice is None:
        if made._engines.device == "nccl":
            needs("nccl")
        made._choice = _new_choice(made)
    return made._choice


def _new_choice(group: ProcessGroup) -> GpuBackendSelector:
    from rankmesh._stores import PrefixStore

    world, host = require_world(), group._communicator
    store = PrefixStore(f"gpu/{host.id:016x}", world.store.clone())
    store.set_timeout(timedelta(seconds=host.timeout))

    def check(ranks: Sequence[int]) -> None:
        error = host.failure or host.peer_lost_error(ranks, "connect")
        if error is not None:
            raise error

    exchange = StoreExchange(store, host.rank, lambda: host.global_ranks, check)
    hosts = [world.agent.host_of(rank) for rank in host.ranks]
    return GpuBackendSelector(host, exchange, hosts, group._engines.device)


def array_of(tensor: Any, name: str) -> tuple[DeviceArray, Store | None]:
    """Return the elements of an array on a GPU, and what copies them back where they are copies.

    Args:
        tensor: CuPy array, CUDA torch tensor, or what exports CUDA's array interface or DLPack; of any shape.
        name: the argument's name, for errors.

    Raises:
        TypeError: it is none of these, or its elements cannot be communicated.
        ValueError: it is a tensor whose storage was freed.
    """
    from rankmesh._tensors.arrays import supported

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if not tensor.is_cuda:
            raise TypeError(_mixed(tensor, name))
        refuse_not_dense(torch, tensor, name)
        plain = tensor.detach()
        refuse_freed(plain, name)
        store: Store | None = None
        if plain.is_conj() or plain.is_neg() or not plain.is_contiguous():
            whole, plain = plain, plain.resolve_conj().resolve_neg().contiguous()
            store = _copy_back(whole, plain)
        dtype, device = torch_dtype(torch, plain.dtype)[0], plain.device.index
        return DeviceArray(plain.data_ptr(), plain.numel(), dtype, device, plain, TorchStreams(torch)), store
    if not on_cuda(tensor):
        raise TypeError(_mixed(tensor, name))
    array = as_cupy(tensor)
    native = supported(np.dtype(array.dtype), name)
    if array.dtype != native:
        raise TypeError(f"{name} is in another byte order than this machine's: pass {name}.astype({native.name!r})")
    store = None
    if not array.flags.c_contiguous:
        whole = _bits(array)
        with array.device:  # CuPy copies on the current one
            array = runtime.cupy().ascontiguousarray(whole)
        store = _write_back(whole, array)
    return DeviceArray(array.data.ptr, array.size, native, array.device.id, array, _CUPY), store


def as_cupy(tensor: Any) -> Any:
    """Return a CuPy array over the memory of what is on a GPU."""
    cupy = runtime.cupy()
    if isinstance(tensor, cupy.ndarray):
        return tensor
    if hasattr(type(tensor), "__cuda_array_interface__"):
        return cupy.asarray(tensor)
    return cupy.from_dlpack(tensor)


def staged(tensor: Any, name: str) -> tuple[Array, Store | None]:
    """Return a copy in host memory of an array on a GPU, and what brings it back there: see _containers.memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _staged_by_torch(torch, tensor, name)
    why = runtime.unavailable_reason()
    if why:
        raise TypeError(f"{name} is a {kind_of(tensor)} on a GPU, which cannot be read: {why}")
    array = as_cupy(tensor)
    bits = _bits(array)
    host = bits.get()

    def bring_back() -> None:
        with bits.device:
            bits[...] = runtime.cupy().asarray(host)
            runtime.synchronize_stream(runtime.current_stream())  # nobody who waits for the call looks at a stream

    return host.view(np.dtype(array.dtype)), bring_back


def _staged_by_torch(torch: Any, tensor: Any, name: str) -> tuple[Array, Store]:
    """Return a tensor's copy: torch knows about its current stream, gradients and conjugated views."""
    plain = tensor.detach()
    refuse_freed(plain, name)
    host = plain.cpu()
    array, resolve = memory(host, name)

    def bring_back() -> None:
        if resolve is not None:
            resolve()
        plain.copy_(host)
        torch.cuda.current_stream(plain.device).synchronize()  # nobody who waits for the call looks at a stream

    return array, bring_back


def _bits(array: Any) -> Any:
    """Return a view of an array whose elements CuPy can copy whatever their order: of float8 it cannot."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= _WIDEST_BITS else array


def _copy_back(whole: Any, part: Any) -> Store:
    return lambda: whole.copy_(part)


def _write_back(whole: Any, part: Any) -> Store:
    def write() -> None:
        whole[...] = part.reshape(whole.shape)

    return write


def _mixed(tensor: Any, name: str) -> str:
    return (
        f"{name} is a {kind_of(tensor)} in host memory, but another array of the call is on a GPU: "
        "all arrays of a call have to be on one GPU, or all in host memory"
    )
