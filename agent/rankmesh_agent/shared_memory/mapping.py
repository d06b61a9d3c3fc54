"""Shared memory of the processes of one host, and the futex they sleep on, by libc through ctypes.

One process creates a file in a tmpfs, its peers open it by its name, and the creator unlinks it when they have.
Creation reserves the space: a write to a full tmpfs would kill the process with SIGBUS. Until it unlinks the file, the
creator holds a lock (flock) on it, which ends with the process: a file that can be locked is an orphan, and
``orphans`` deletes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import secrets
import sys
import weakref

import numpy as np
import numpy.typing as npt

from rankmesh_agent import native
from rankmesh_agent.net.descriptors import reason
from rankmesh_agent.shared_memory.orphans import JOB_CHARACTERS, NAME
from rankmesh_agent.wire.errors import DistNetworkError

if sys.platform != "win32":
    import fcntl

CACHE_LINE = 64
"""Bytes of a cache line: words that two processes write must not share one."""

TOTAL_STORE_ORDER = platform.machine() in ("x86_64", "AMD64")
"""True on x86-64: all cores see the accesses of each in program order, but for a load before an earlier store."""
_FUTEX = 202 if TOTAL_STORE_ORDER else 98
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _syscall = _libc.syscall
    _syscall.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint32,
    )  # fmt: skip
    _syscall.restype = ctypes.c_long
    _mmap = _libc.mmap
    _mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    _mmap.restype = ctypes.c_void_p
    _mremap = _libc.mremap
    _mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    _mremap.restype = ctypes.c_void_p
    _munmap = _libc.munmap
    _munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_lost: list[mmap.mmap] = []


def unsupported() -> str:
    """Return why this machine cannot share memory between ranks, or '' if it can.

    The algorithms store data, then a flag, and rely on other cores seeing both in that order. x86-64 guarantees it;
    other architectures need a fence at every flag, which only the compiled core has.
    """
    if sys.platform != "linux":
        return f"shared memory needs Linux, this is {sys.platform}"
    if not TOTAL_STORE_ORDER and native.core is None:
        return f"shared memory needs the compiled core on {platform.machine()}: {native.reason}"
    return ""


def futex_wake(address: int) -> None:
    """Wake all threads, of any process, that sleep on the 32-bit word at ``address``."""
    _syscall(_FUTEX, address, _WAKE, _ALL_WAITERS, None, None, 0)


def futex_wait(address: int, value: int, timeout: ctypes._Pointer[_Timespec] | None) -> None:
    """Sleep until woken, unless the word at ``address`` no longer is ``value``; at most ``timeout``.

    It may return early, on a signal for example: the caller reads the word again.
    """
    _syscall(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, timeout, None, 0)


def timespec_of(seconds: float) -> ctypes._Pointer[_Timespec]:
    """Return a timeout for ``futex_wait``; callers build it once and reuse it."""
    whole = int(seconds)
    return ctypes.pointer(_Timespec(whole, int((seconds - whole) * 1e9)))


_SUGGESTED_SIZE = "1g"


class NoSharedMemoryError(DistNetworkError, code="no-shared-memory", status=507):
    """This process cannot create shared memory, which another attempt does not change."""


class Mapping:
    """A file of shared memory, mapped.

    Args:
        descriptor: the file's descriptor, which this object closes; -1 for memory of this process alone.
        path: the file's, if this process has created it.

    Attributes:
        name: the file's name, for the peers that open it, at most 76 ASCII characters; empty if this process has not
            created it.
        bytes: the memory, uint8.
        descriptor: the file's descriptor, -1 once ``release`` has closed it; ``open`` does so, too.
    """

    def __init__(self, descriptor: int, size: int, path: str = "") -> None:
        self._path = path
        self.name = os.path.basename(path)
        self._memory = _map(descriptor, size)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self.address = int(self.bytes.__array_interface__["data"][0])
        self.descriptor = descriptor
        self._finalizer = weakref.finalize(self, _close, descriptor)
        self._finalizer.atexit = False

    @classmethod
    def create(cls, directory: str, job: str, size: int) -> Mapping:
        """Create a file of ``size`` zero bytes and map it; call ``release`` once all peers have opened it.

        Raises:
            NoSharedMemoryError: the tmpfs is full (the error names the remedy), or the directory is missing.
        """
        label = re.sub(r"[^A-Za-z0-9_.-]", "_", job)[:JOB_CHARACTERS]
        path = f"{directory}/rankmesh-{label}-{os.getpid()}.{secrets.token_hex(8)}"
        try:
            descriptor = _create_locked(path)
        except OSError as error:
            raise NoSharedMemoryError(
                f"cannot make shared memory in {directory}: {reason(error)}; set RANKMESH_SHM_DIR to a writable "
                "tmpfs, or RANKMESH_TRANSPORT=tcp"
            ) from error
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(descriptor, size, path)
        except BaseException as error:
            os.unlink(path)
            os.close(descriptor)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                room = os.statvfs(directory)
                raise NoSharedMemoryError(
                    f"{directory} has no room for {size >> 20} MiB of shared memory "
                    f"({room.f_bavail * room.f_bsize >> 20} MiB are free); enlarge it (mount -o "
                    f"remount,size={_SUGGESTED_SIZE} {directory}, docker run --shm-size {_SUGGESTED_SIZE}, shm_size in "
                    "compose), set RANKMESH_SHM_DIR to a larger tmpfs, or RANKMESH_TRANSPORT=tcp"
                ) from error
            raise NoSharedMemoryError(f"cannot map shared memory in {directory}: {reason(error)}") from error

    @classmethod
    def open(cls, directory: str, name: str, size: int) -> Mapping:
        """Map a file that another process has created."""
        if re.fullmatch(NAME, name) is None:
            raise DistNetworkError(f"{name!r} is not a name of shared memory")
        path = f"{directory}/{name}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise DistNetworkError(f"cannot open shared memory {path}: {reason(error)}") from error
        try:
            if os.fstat(descriptor).st_size != size:
                raise DistNetworkError(f"the shared memory differs from its announcement of {size} bytes")
            mapping = cls(descriptor, size)
        except BaseException as error:
            os.close(descriptor)
            if not isinstance(error, OSError):
                raise
            raise DistNetworkError(f"cannot map the shared memory of a peer: {reason(error)}") from error
        mapping.release()
        return mapping

    @classmethod
    def anonymous(cls, size: int) -> Mapping:
        """Map ``size`` zero bytes that no other process sees, for a rank alone in its group."""
        return cls(-1, size)

    def words(self, offset: int, nbytes: int) -> memoryview:
        """Return words of 8 bytes, to be indexed alone, by which processes tell each other of bytes of this memory."""
        if TOTAL_STORE_ORDER or native.core is None:  # without it, no other process has this memory
            return self.bytes.data[offset : offset + nbytes].cast("Q")
        ordered: memoryview = native.core.Words(self.bytes, self.address + offset)
        return ordered

    def release(self) -> None:
        """Unlink the file and close its descriptor, so that no more peers can open it; the mappings remain valid."""
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = ""
        self.descriptor = -1
        self._finalizer()


def _map(descriptor: int, size: int) -> mmap.mmap:
    """Return memory of a file; of this process alone if the descriptor is -1."""
    # An mmap.mmap of the file would keep a copy of the descriptor, one for each peer and group. So the file replaces
    # anonymous memory in place; the object unmaps whatever is there.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    if descriptor >= 0:
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(address, size, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
            code = ctypes.get_errno()
            _lost.append(memory)  # the kernel may have unmapped it, and have given the addresses to others
            raise OSError(code, os.strerror(code))
    return memory


def make_private(address: int, nbytes: int) -> bool:
    """Replace pages of shared memory by pages of this process alone, at the same addresses.

    Other processes' writes do not reach them from then on. A write of another thread of this process that comes
    meanwhile may be lost.

    Returns:
        Whether the pages have their contents; they are zero if there is no memory for a copy.

    Raises:
        OSError: nothing has changed.
    """
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = _mmap(None, nbytes, access, flags, -1, 0)
    if pages == _MAP_FAILED:
        replaced = _mmap(address, nbytes, access, flags | _MAP_NORESERVE | _MAP_FIXED, -1, 0)
    else:
        ctypes.memmove(pages, address, nbytes)
        replaced = _mremap(pages, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
    if replaced != address:
        code = ctypes.get_errno()
        if pages != _MAP_FAILED:
            _munmap(pages, nbytes)
        raise OSError(code, os.strerror(code))
    return bool(pages != _MAP_FAILED)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _create_locked(path: str) -> int:
    """Create a file and lock it; return its descriptor."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else remove_orphans came before the lock
                return descriptor
        except BaseException:
            os.unlink(path)
            os.close(descriptor)
            raise
        os.close(descriptor)
