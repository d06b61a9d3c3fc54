"""Reductions and scaling of arrays on GPUs, by the kernels of their device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.device.kernels import Kernels
from rankmesh_agent.wire.ops import ReduceOp


def combine(op: ReduceOp, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], stream: int, device: int) -> None:
    """Reduce arrays, one a rank, in rank order, into each of ``outs``: see Kernels.reduce.

    Args:
        op: the reduction; PREMUL_SUM adds.
        parts: at least one array, of the outs' dtype and size.
        outs: receive the result; may be parts.
        stream: the stream to enqueue the kernel on.
        device: the stream's device, which is current.
    """
    if outs and outs[0].size:
        sources, destinations = [part.pointer for part in parts], [out.pointer for out in outs]
        kernels_of(device).reduce(op, outs[0].dtype, sources, destinations, outs[0].size, stream)


def premultiplied(factor: complex, array: DeviceArray) -> DeviceArray:
    """Return a copy of ``array`` multiplied by ``factor``, rounded once, on the current stream."""
    out = array.empty_like()
    with runtime.DeviceGuard(array.device):
        stream = array.streams.current(array.device)
        kernels_of(array.device).scale(factor, array.dtype, array.pointer, out.pointer, array.size, stream)
    return out


@functools.cache
def kernels_of(device: int) -> Kernels:
    """Return the kernels of a device."""
    return Kernels(runtime.multiprocessors(device))
