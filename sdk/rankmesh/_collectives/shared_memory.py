"""rankmesh.empty: arrays in shared memory, on which collectives need no copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from rankmesh._collectives.arguments import Timeout, communicator, options
from rankmesh._collectives.coalescing import is_recording
from rankmesh._session.process_group import Group
from rankmesh._tensors.layout import Array, supported


def empty(
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: npt.DTypeLike = np.float32,
    group: Group = None,
    *,
    timeout: Timeout = None,
) -> Array | None:
    """Return a new array in the group's shared memory: a collective call that every member makes with the same shape.

    A collective of the group on such arrays, or on contiguous parts of them, reads and writes them in place instead of
    copying them through the segment; all ranks have to pass one, not necessarily the same part. In every other respect
    they are ordinary NumPy arrays. A call that fails leaves its arrays in memory of this rank alone: no rank that is
    late changes them afterwards. If there is no memory for a copy, they are zero then. Memory without references on any
    rank is freed when the group makes the next array, and all of it when the group is destroyed and the arrays are
    gone.

    If the members share no memory (several hosts, RANKMESH_TRANSPORT=tcp, a group of one), the array is in ordinary
    memory; programs work unchanged.

    Args:
        shape: of the array.
        dtype: of the array.
        group: the group, the world by default.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A C-contiguous array with undefined contents. Returns None and warns on ranks outside the group.

    Raises:
        TypeError: arrays of that dtype cannot be communicated.
        ValueError: the shape is negative.
        RuntimeError: a batch of the group is open.
        DistNetworkError: the directory for shared memory is full; raised on every rank, with the remedy.
        CollectiveMismatchError: the ranks requested different numbers of elements or dtypes.
        RankFailedError, CollectiveTimeoutError: see all_reduce.

    Source: numpy.empty; torch.distributed has no counterpart for CPU arrays.
    """
    comm = communicator(group, "empty")
    if comm is None:
        return None
    if is_recording(comm):
        raise RuntimeError("empty() needs the other ranks at once: call it outside of the batch")
    native = supported(np.dtype(dtype), "the array")
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape must not be negative, got {shape!r}")
    return comm.empty(native, math.prod(sizes), options(comm, timeout, False, [])).reshape(sizes)
