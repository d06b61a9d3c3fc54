"""Memory that processes of one host share, and the futex they sleep on: libc through ctypes, no compiled code.

A file is made in a tmpfs, mapped by everyone concerned and unlinked at once, so that nothing is left behind however the
processes end. Room is reserved when it is made: writing to a full tmpfs would kill the process with SIGBUS.
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
"""Bytes of a cache line: what two processes write must not share one."""

_FUTEX = 202  # x86-64
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF
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

    The algorithms store data, then a flag, and rely on others seeing them in that order. x86-64 promises it; elsewhere
    every flag would need a fence that Python cannot give.
    """
    if sys.platform != "linux":
        return f"shared memory needs Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory needs the memory order of x86-64, this is {platform.machine()}"
    return ""


def futex_wake(address: int) -> None:
    """Wake every thread, of any process, that sleeps on the 32-bit word at ``address``."""
    _syscall(_FUTEX, address, _WAKE, _EVERYONE, None, None, 0)


def futex_wait(address: int, value: int, timeout: ctypes._Pointer[_Timespec] | None) -> None:
    """Sleep until woken, unless the word at ``address`` no longer is ``value``; at most ``timeout``.

    May return early without a reason (a signal, for one): the caller looks at the word again.
    """
    _syscall(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, timeout, None, 0)


def timespec_of(seconds: float) -> ctypes._Pointer[_Timespec]:
    """Return a timeout for ``sleep``; make it once, use it often."""
    whole = int(seconds)
    return ctypes.pointer(_Timespec(whole, int((seconds - whole) * 1e9)))


class Mapping:
    """A piece of memory shared between processes.

    Attributes:
        name: the file's name in its directory; peers open it by that.
        path: where it was made.
        bytes: the memory as an array of uint8.
        address: where it begins in this process.
        descriptor: of the file, as long as this object lives; -1 if it was not to be kept.
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
        """Make a new file of ``size`` zero bytes and map it.

        Raises:
            DistNetworkError: there is no room, or no such directory; says how to get room.
        """
        name = f"rankmesh-{re.sub(r'[^A-Za-z0-9_.-]', '_', job)[:64]}-{secrets.token_hex(8)}"
        path = f"{directory}/{name}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise DistNetworkError(
                f"cannot make shared memory in {directory}: {error.strerror}; set RANKMESH_SHM_DIR to a tmpfs one may "
                "write to, or RANKMESH_TRANSPORT=tcp"
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
        """Map the file another process made.

        Raises:
            DistNetworkError: there is no such file here, or it is not what was announced.
        """
        if not _NAME.fullmatch(name):
            raise DistNetworkError(f"{name!r} is not a name of shared memory")
        try:
            descriptor = os.open(f"{directory}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise DistNetworkError(f"cannot open shared memory {directory}/{name}: {error.strerror}") from error
        try:
            if os.fstat(descriptor).st_size != size:
                raise DistNetworkError(f"shared memory {directory}/{name} has not the announced size of {size} bytes")
            return cls(directory, name, descriptor, size, keep=keep)
        except OSError as error:
            raise DistNetworkError(f"cannot map shared memory {directory}/{name}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    @classmethod
    def from_descriptor(cls, descriptor: int, size: int) -> Mapping:
        """Map a file that another process has open and passed on; the descriptor is this object's to close.

        Raises:
            DistNetworkError: it is not what was announced.
        """
        try:
            if os.fstat(descriptor).st_size != size:
                raise DistNetworkError(f"shared memory that was passed on has not the announced size of {size} bytes")
            return cls("", "", descriptor, size)
        except OSError as error:
            raise DistNetworkError(f"cannot map shared memory that was passed on: {error.strerror}") from error
        finally:
            os.close(descriptor)

    @classmethod
    def anonymous(cls, size: int) -> Mapping:
        """Map ``size`` zero bytes that no other process sees: what a rank shares with itself."""
        return cls("", "", -1, size)

    def unlink(self) -> None:
        """Remove the file's name, if it has one; the memory stays for those who mapped it."""
        if not self.name:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def host_id(directory: str) -> str:
    """Return a name that is equal for two processes exactly when they see the same shared memory directory.

    The kernel's boot id tells machines apart, the directory's device and inode containers and mount namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else platform.node()
    try:
        where = os.stat(directory)
    except OSError:
        return f"{machine}/none-{os.getpid()}"
    return f"{machine}/{where.st_dev}-{where.st_ino}"
