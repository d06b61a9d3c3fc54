"""Arrays in memory that the ranks of a group share: collectives on them need no copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from rankmesh._collectives.arguments import Timeout, members_of, options
from rankmesh._session.session import Group
from rankmesh._tensors.arrays import supported
from rankmesh._tensors.containers import Array


def empty(
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: npt.DTypeLike = np.float32,
    group: Group = None,
    *,
    timeout: Timeout = None,
) -> Array | None:
    """Return a new array in the group's shared memory: a collective call that every member makes with the same shape.

    A collective of the group on such arrays, or on contiguous parts of them, reads and writes them where they lie
    instead of copying them through the segment; all ranks have to pass one, which need not be the same part. In every
    other respect they are ordinary NumPy arrays. Memory that no rank has a reference to any more is given back when the
    group makes the next array, and all of it when the group is destroyed and the arrays are gone.

    Where the members share no memory (several hosts, RANKMESH_TRANSPORT=tcp, a group of one) the array is ordinary
    memory, so that a program need not care.

    Args:
        shape: of the array.
        dtype: of the array.
        group: the group, the world by default.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A C-contiguous array; what is in it is not defined. None, with a warning, at ranks that are not in the group.

    Raises:
        TypeError: arrays of that dtype cannot be communicated.
        ValueError: the shape is negative.
        RuntimeError: a batch of the group is open.
        DistNetworkError: there is no room in the shared memory's directory, at every rank; says how to get some.
        CollectiveMismatchError: the ranks did not ask for the same number of elements and dtype.
        RankFailedError, CollectiveTimeoutError: see all_reduce.

    Source: numpy.empty; torch.distributed has nothing like it for CPU arrays.
    """
    comm = members_of(group, "empty")
    if comm is None:
        return None
    if comm.batching:
        raise RuntimeError("empty() needs the other ranks at once: call it outside of the batch")
    native = supported(np.dtype(dtype), "the array")
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape must not be negative, got {shape!r}")
    return comm.empty(native, math.prod(sizes), options(comm, timeout, False, [])).reshape(sizes)
