"""A stand-in for CuPy, beside one for nccl4py, on machines without a GPU: what it computes is right, and it is late.

A stream is a thread that does what was enqueued, later; events order streams. NCCL's calls meet in one of the
processes. What the code under test leaves unordered happens in an order that a seed decides; what it gave back,
somebody else writes to at once; what it uses without having it fails as on a GPU, where that is cheap to see.

It cannot show how fast anything is, what a GPU's memory model allows, or what CUDA's driver and NCCL really do when
they fail. Names, arguments and errors are CuPy 14's; tests/test_cuda_double.py compares where that is installed.

Environment variables tell a process what it has:

* ``CUDA_DOUBLE_GPUS``: names with commas, one a device; processes that give the same name share a GPU.
  Instances of one (MIG) have names that differ behind a slash. None: no GPU.
* ``CUDA_DOUBLE_WITHOUT``: ``nccl``, whose library is not there then.
* ``CUDA_DOUBLE_MEMORY``: bytes that a process can have of a GPU.
* ``CUDA_DOUBLE_DELAY``: the longest pause before some work, in seconds; ``CUDA_DOUBLE_SEED`` decides which.
"""

from cupy import cuda
from cupy._array import (
    arange,
    array,
    array_equal,
    asarray,
    ascontiguousarray,
    concatenate,
    empty,
    empty_like,
    from_dlpack,
    full,
    ndarray,
    ones,
    zeros,
    zeros_like,
)

__version__ = "14.2.0"


def get_default_memory_pool() -> cuda.MemoryPool:
    return cuda.memory._pool


__all__ = [
    "arange",
    "array",
    "array_equal",
    "asarray",
    "ascontiguousarray",
    "concatenate",
    "cuda",
    "empty",
    "empty_like",
    "from_dlpack",
    "full",
    "get_default_memory_pool",
    "ndarray",
    "ones",
    "zeros",
    "zeros_like",
]
