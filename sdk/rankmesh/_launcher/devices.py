"""How many ranks a host has room for."""

from __future__ import annotations

import ctypes
import os


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> int:
    """Return the number of GPUs this process may use, by CUDA's driver, which knows CUDA_VISIBLE_DEVICES; 0 without."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
