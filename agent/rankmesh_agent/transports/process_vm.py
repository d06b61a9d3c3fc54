"""Reading another process's memory: one copy where shared memory needs two, with process_vm_readv(2) through ctypes.

The kernel allows it between processes of one user that may trace each other. Containers and security modules often
forbid it, so whoever wants to use it asks ``allowed`` first, by reading something that only the right process has.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.errors import DistNetworkError

CHUNK_BYTES = 8 << 20
"""Bytes of one system call: between two of them Ctrl-C and other threads get through."""


_LONG = 8 << 20
"""Bytes from which it is worth starting a thread."""
_PAGE = 4096


# None where the C library does not know it: it is not Linux.
_readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip
    _readv.restype = ctypes.c_ssize_t
_Vectors = ctypes.c_size_t * 4
"""Two iovec: address and length here, address and length there."""
_VECTOR = ctypes.sizeof(_Vectors) // 2


def address_of(view: memoryview | npt.NDArray[Any]) -> int:
    """Return where the contiguous bytes of ``view`` begin in this process."""
    array = view if isinstance(view, np.ndarray) else np.frombuffer(view, np.uint8)
    return int(array.__array_interface__["data"][0])


def read_into(pid: int, address: int, into: memoryview | npt.NDArray[Any], *, parallel: bool = False) -> None:
    """Fill ``into`` with another process's memory.

    The other process must keep the memory as it is meanwhile: nothing tells a reader that it has changed.

    Args:
        pid: the process, as this one's process table knows it.
        address: where to begin in it.
        into: contiguous and writable, of any dtype.
        parallel: see ``read``.

    Raises:
        DistNetworkError: the process is gone, has no such memory, or must not be read; ``into`` may be half filled.
    """
    if into.nbytes:
        read(pid, address, address_of(into), into.nbytes, parallel=parallel)


def read(pid: int, address: int, into: int, nbytes: int, *, parallel: bool = False) -> None:
    """Do what read_into does, to an address of this process whose ``nbytes`` bytes stay where they are.

    Args:
        parallel: have a second thread read the second half, if it is long: for who knows of a core without work, that
            of the rank that waits until its memory has been read, say.

    Raises:
        DistNetworkError: see read_into.
    """
    if _readv is None:
        raise _refused(pid, address, errno.ENOSYS)
    if not parallel or nbytes < _LONG:
        _read(pid, address, into, nbytes)
        return
    half = nbytes // 2 // _PAGE * _PAGE
    failures: list[BaseException] = []

    def read_second_half() -> None:
        try:
            _read(pid, address + half, into + half, nbytes - half)
        except BaseException as error:
            failures.append(error)

    second = threading.Thread(target=read_second_half, name="rankmesh-read", daemon=True)
    second.start()
    try:
        _read(pid, address, into, half)
    finally:
        second.join()  # nobody else may touch ``into`` before, also after Ctrl-C
    if failures:
        raise failures[0]


def _read(pid: int, address: int, into: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        length = min(CHUNK_BYTES, nbytes - done)
        vectors = _Vectors(into + done, length, address + done, length)
        begin = ctypes.addressof(vectors)
        count = _readv(pid, begin, 1, begin + _VECTOR, 1, 0)
        if count <= 0:
            raise _refused(pid, address + done, ctypes.get_errno() if count else errno.EFAULT)
        done += count


def can_read(pid: int, address: int, expected: bytes) -> bool:
    """Return whether this process may read that one's memory, and it is the right one: ``expected`` is at ``address``.

    Args:
        pid: the process; in another process namespace the number may mean another one, or none.
        address: where it says that ``expected`` is.
        expected: what nobody else would have there: a nonce.
    """
    if not 0 < pid < 1 << 31 or not 0 < address < 1 << 63:
        return False
    found = bytearray(len(expected))
    try:
        read_into(pid, address, memoryview(found))
    except DistNetworkError:
        return False
    return found == expected


def _refused(pid: int, address: int, number: int) -> DistNetworkError:
    return DistNetworkError(f"cannot read the memory of process {pid} at {address:#x}: {os.strerror(number)}")
