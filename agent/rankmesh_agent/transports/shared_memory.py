"""Shared memory of the processes of one host, and the futex they sleep on: libc through ctypes, no compiled code.

One process creates a file in a tmpfs, all processes map it, and its name is unlinked at once, so no file remains
however the processes end. Creation reserves the space: a write to a full tmpfs would kill the process with SIGBUS.
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
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire.errors import DistNetworkError

CACHE_LINE = 64
"""Bytes of a cache line: words that two processes write must not share one."""

_FUTEX = 202  # x86-64
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 0x7FFFFFFF
_NAME = re.compile(r"rankmesh-[A-Za-z0-9_.-]{1,128}")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
)  # fmt: skip
_syscall.restype = ctypes.c_long


def unsupported() -> str:
    """Return why this machine cannot share memory between ranks, or '' if it can.

    The algorithms store data, then a flag, and rely on other cores seeing both in that order. x86-64 guarantees it;
    other architectures need a fence at every flag, which Python does not have.
    """
    if sys.platform != "linux":
        return f"shared memory needs Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory needs the memory order of x86-64, this is {platform.machine()}"
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


class Mapping:
    """A file of shared memory, mapped.

    Attributes:
        name: the file's name in its directory; peers open it by this name.
        path: the file's path.
        bytes: the memory, uint8.
        address: address of the first byte in this process.
        descriptor: the file's descriptor, open as long as this object lives; -1 without ``keep``.
    """

    def __init__(self, directory: str, name: str, descriptor: int, size: int, *, keep: bool = False) -> None:
        self.name = name
        self.path = f"{directory}/{name}"
        self._memory = mmap.mmap(descriptor, size)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self.address = int(self.bytes.__array_interface__["data"][0])
        self.descriptor = os.dup(descriptor) if keep else -1
        if keep:
            weakref.finalize(self, os.close, self.descriptor)

    @classmethod
    def create(cls, directory: str, job: str, size: int, *, keep: bool = False) -> Mapping:
        """Create a file of ``size`` zero bytes and map it.

        Raises:
            DistNetworkError: the tmpfs is full (the error names the remedy), or the directory is missing.
        """
        name = f"rankmesh-{re.sub(r'[^A-Za-z0-9_.-]', '_', job)[:64]}-{secrets.token_hex(8)}"
        path = f"{directory}/{name}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise DistNetworkError(
                f"cannot make shared memory in {directory}: {error.strerror}; set RANKMESH_SHM_DIR to a writable "
                "tmpfs, or RANKMESH_TRANSPORT=tcp"
            ) from error
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(directory, name, descriptor, size, keep=keep)
        except BaseException as error:
            os.unlink(path)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                room = os.statvfs(directory)
                raise DistNetworkError(
                    f"{directory} has no room for {size >> 20} MiB of shared memory "
                    f"({room.f_bavail * room.f_bsize >> 20} MiB are free); enlarge it (docker run --shm-size, shm_size "
                    "in compose) or set RANKMESH_TRANSPORT=tcp"
                ) from error
            raise DistNetworkError(f"cannot map shared memory {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, directory: str, name: str, size: int, *, keep: bool = False) -> Mapping:
        """Map a file that another process has created.

        Raises:
            DistNetworkError: the file does not exist here, or differs from its announcement.
        """
        if not _NAME.fullmatch(name):
            raise DistNetworkError(f"{name!r} is not a name of shared memory")
        try:
            descriptor = os.open(f"{directory}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise DistNetworkError(f"cannot open shared memory {directory}/{name}: {error.strerror}") from error
        return cls._checked(directory, name, descriptor, size, f"shared memory {directory}/{name}", keep=keep)

    @classmethod
    def from_descriptor(cls, descriptor: int, size: int) -> Mapping:
        """Map a file whose descriptor another process has sent; this method closes the descriptor.

        Raises:
            DistNetworkError: the file differs from its announcement.
        """
        return cls._checked("", "", descriptor, size, "received shared memory")

    @classmethod
    def _checked(
        cls, directory: str, name: str, descriptor: int, size: int, subject: str, *, keep: bool = False
    ) -> Mapping:
        """Map a file of another process, and close its descriptor."""
        try:
            if os.fstat(descriptor).st_size != size:
                raise DistNetworkError(f"{subject} has not the announced size of {size} bytes")
            return cls(directory, name, descriptor, size, keep=keep)
        except OSError as error:
            raise DistNetworkError(f"cannot map {subject}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    @classmethod
    def anonymous(cls, size: int) -> Mapping:
        """Map ``size`` zero bytes that no other process sees, for a rank alone in its group."""
        return cls("", "", -1, size)

    def unlink(self) -> None:
        """Remove the file's name, if it has one; existing mappings remain valid."""
        if not self.name:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def host_id(directory: str) -> str:
    """Return a name that is equal for two processes exactly if they see the same shared memory directory.

    The kernel's boot id distinguishes machines; the directory's device and inode distinguish mount namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else platform.node()
    try:
        where = os.stat(directory)
    except OSError:
        return f"{machine}/none-{os.getpid()}"
    return f"{machine}/{where.st_dev}-{where.st_ino}"
