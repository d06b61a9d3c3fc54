"""Numbers of cores and GPUs, from which ``--nproc-per-node`` is derived."""

from __future__ import annotations

import ctypes
import os


def cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0))


def gpus() -> int:
    """Return the number of GPUs that CUDA's driver offers, after CUDA_VISIBLE_DEVICES; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
