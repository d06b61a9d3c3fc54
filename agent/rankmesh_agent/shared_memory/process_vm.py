"""Reads of another process's memory: one copy where shared memory needs two, with process_vm_readv(2) through ctypes.

The kernel allows it between processes of one user that may trace each other. Containers and security modules often
forbid it, so a caller calls ``can_read`` first, which reads a nonce that only the right process has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from concurrent.futures import wait
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.net.deadline import in_thread
from rankmesh_agent.wire.errors import DistNetworkError

CHUNK_BYTES = 8 << 20
"""Bytes of one system call: between two calls, Ctrl-C and other threads get their turn."""


_PARALLEL_BYTES = 8 << 20
"""Minimum size in bytes for which a second thread pays."""
_PAGE = 4096
_SET_PTRACER = 0x59616D61
"""An option of prctl(2); a kernel without Yama knows none such, and allows it."""


# None if the C library lacks it: the system is not Linux.
_readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip
    _readv.restype = ctypes.c_ssize_t
_Vectors = ctypes.c_size_t * 4
"""Two iovec: local address and length, remote address and length."""
_VECTOR = ctypes.sizeof(_Vectors) // 2


def allow_reads() -> None:
    """Let processes of this user read this one's memory, and its stacks, where Yama leaves that to its parent alone."""
    with contextlib.suppress(AttributeError):  # no such call: the system is not Linux
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def address_of(view: memoryview | npt.NDArray[Any]) -> int:
    """Return the address of the contiguous bytes of ``view`` in this process."""
    buffer: Any = view
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # a quarter of the time that the interface takes
    except (TypeError, ValueError):  # read-only, empty, or of a dtype that has no buffer
        array = view if isinstance(view, np.ndarray) else np.frombuffer(view, np.uint8)
        return int(array.__array_interface__["data"][0])


def read_into(pid: int, address: int, into: memoryview | npt.NDArray[Any], *, parallel: bool = False) -> None:
    """Fill ``into`` with another process's memory.

    The other process must not change the memory meanwhile: a reader cannot detect a change.

    Args:
        pid: the process, in the process namespace of this one.
        address: the first byte, in that process.
        into: contiguous and writable, of any dtype.
        parallel: whether a second thread reads the second half of a long read. This pays if a core is idle, such as
            that of the rank that waits for the read.

    Raises:
        DistNetworkError: the process is gone, has no such memory, or must not be read; ``into`` may be partly filled.
    """
    if into.nbytes:
        read(pid, address, address_of(into), into.nbytes, parallel=parallel)


def read(pid: int, address: int, into: int, nbytes: int, *, parallel: bool = False) -> None:
    """Read as read_into does, to an address of this process whose ``nbytes`` bytes stay allocated."""
    if _readv is None:
        raise _read_error(pid, address, errno.ENOSYS)
    if not parallel or nbytes < _PARALLEL_BYTES:
        _read(pid, address, into, nbytes)
        return
    half = nbytes // 2 // _PAGE * _PAGE
    second = in_thread("rankmesh-read", _read, pid, address + half, into + half, nbytes - half)
    try:
        _read(pid, address, into, half)
    finally:
        wait([second])  # ``into`` is in use until then, also after Ctrl-C
    second.result()


def _read(pid: int, address: int, into: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        length = min(CHUNK_BYTES, nbytes - done)
        vectors = _Vectors(into + done, length, address + done, length)
        begin = ctypes.addressof(vectors)
        count = _readv(pid, begin, 1, begin + _VECTOR, 1, 0)
        if count <= 0:
            raise _read_error(pid, address + done, ctypes.get_errno() if count else errno.EFAULT)
        done += count


def can_read(pid: int, address: int, expected: bytes) -> bool:
    """Return whether this process may read another one's memory, and finds ``expected`` at ``address``.

    Args:
        pid: the process; in another process namespace the number may belong to another process, or to none.
        address: the address of ``expected``, as that process has reported it.
        expected: a nonce, which no other process has there.
    """
    if not 0 < pid < 1 << 31 or not 0 < address < 1 << 63:
        return False
    found = bytearray(len(expected))
    try:
        read_into(pid, address, memoryview(found))
    except DistNetworkError:
        return False
    return found == expected


def _read_error(pid: int, address: int, number: int) -> DistNetworkError:
    return DistNetworkError(f"cannot read the memory of process {pid} at {address:#x}: {os.strerror(number)}")
