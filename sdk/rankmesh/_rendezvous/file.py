"""``file:///path``: a shared file contains the addresses of the gateways.

The file holds JSON, ``{"gateways": {job: {"url": …, "id": …}}}``. The host of a job's gateway is elected by fcntl locks
on single bytes far beyond the end of the file:

* The byte of a job, a hash of its name, is locked by the process that hosts the job's gateway for as long as it does.
  The kernel releases the lock when the process dies, so that another process may host.
* One more byte is locked while the file is written.

An entry of a dead process is harmless: no gateway with its id answers at its URL. Locks are tried, never waited for:
the caller of ``find`` keeps its deadline and tries again.

Another user could name a gateway of its own in the file, and a path may by mistake be that of a file with other
content. So a file is refused unless it is a regular one of this user that is empty or was written by this module.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh._rendezvous.locator import GatewayLocator, configured_address
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistNetworkError

_WRITER = 1 << 40
_JOBS = 1 << 41
_JOB_BYTES = 5
_MAX_BYTES = 1 << 20
_CLOSE_SECONDS = 1.0
_RETRY_SECONDS = 0.01
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: a FIFO, which is refused, would block
_START = b'{"gateways": '


class FileLocator(GatewayLocator):
    """The first process to lock the job's byte of the file hosts the gateway, whatever its rank.

    Args:
        path: the file, in an existing directory; created if needed, and removed with the last gateway in it.
        settings: the process's settings.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        super().__init__(settings, configured_address(settings))
        self._path = path
        self._job_byte = _lock_byte(settings.job)
        self._descriptor = -1
        """Holds the host's locks. Closing any other descriptor of the file would release them, too."""

    def find(self) -> str | None:
        if self._hosted is not None:
            self._hosted.raise_failure()
            return self._hosted.address.url
        there = GatewayAddress.from_document(_read(self._path).get(self._settings.job))
        if there is not None and there.is_reachable():
            return there.url
        return self._try_serve()

    def close(self) -> None:
        if self._hosted is not None:
            with contextlib.suppress(OSError):
                self._erase()
        super().close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _try_serve(self) -> str | None:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        except OSError as error:
            _check_no_link(self._path, error)
            raise ValueError(
                f"file://{self._path}: {error.strerror}; the file is made if needed, but its directory must exist and "
                "be writable"
            ) from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if not (_try_lock(descriptor, self._job_byte) and _try_lock(descriptor, _WRITER)):
                return None
            if self._replaced(descriptor):
                return None
            _check_ours(self._path, descriptor)
            os.fchmod(descriptor, 0o600)
            hosted = HostedGateway(self.bind_host, 0, self._settings)
            undo.callback(hosted.close)
            try:
                self._write(descriptor, _gateways(descriptor) | {self._settings.job: hosted.address._asdict()})
            except OSError as error:
                raise DistNetworkError(
                    f"cannot write file://{self._path}: {error.strerror}", address=str(self._path)
                ) from error
            _unlock(descriptor, _WRITER)
            undo.pop_all()
        self._descriptor, self._hosted = descriptor, hosted
        return hosted.address.url

    def _erase(self) -> None:
        """Remove this job, and jobs whose hosts have died, from the file; remove the file after the last job."""
        give_up = time.monotonic() + _CLOSE_SECONDS
        while not _try_lock(self._descriptor, _WRITER):
            if time.monotonic() > give_up:
                return
            time.sleep(_RETRY_SECONDS)
        others = _gateways(self._descriptor)
        others.pop(self._settings.job, None)
        others = {job: entry for job, entry in others.items() if not self._abandoned(job)}
        if others:
            self._write(self._descriptor, others)
        elif not self._replaced(self._descriptor):
            self._path.unlink(missing_ok=True)
        _unlock(self._descriptor, _WRITER)

    def _abandoned(self, job: str) -> bool:
        """Return whether no process hosts the gateway of another job."""
        byte = _lock_byte(job)
        if not _try_lock(self._descriptor, byte):
            return False
        _unlock(self._descriptor, byte)
        return True

    def _replaced(self, descriptor: int) -> bool:
        """Return whether the path names another file now: a former host has removed this one."""
        try:
            return not os.path.samestat(os.fstat(descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return True

    @staticmethod
    def _write(descriptor: int, gateways: dict[str, Any]) -> None:
        content = json.dumps({"gateways": gateways}).encode()
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))


def _lock_byte(job: str) -> int:
    return _JOBS + int.from_bytes(hashlib.blake2b(job.encode(), digest_size=_JOB_BYTES).digest(), "big")


def _try_lock(descriptor: int, byte: int) -> bool:
    """Try to lock a byte; return whether no other process holds it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES
        return False
    except OSError as error:
        raise DistNetworkError(
            f"file:// needs a file system with fcntl locks, and this one has none: {error.strerror}; use tcp://host:port"
        ) from error
    return True


def _unlock(descriptor: int, byte: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def _read(path: Path) -> dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | _OPEN)
    except OSError:
        return {}  # opening it for writing reports why
    try:
        _check_ours(path, descriptor)
        return _gateways(descriptor)
    finally:
        os.close(descriptor)


def _check_no_link(path: Path, error: OSError) -> None:
    """Raise ValueError if a file could not be opened because it is a symbolic link."""
    if error.errno == errno.ELOOP:
        raise _refusal(path, "it is a symbolic link") from error


def _check_ours(path: Path, descriptor: int) -> None:
    """Raise ValueError unless a file is this user's, and holds what this module writes, or nothing."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(path, "it is not a regular file")
    if found.st_uid != os.geteuid():
        raise _refusal(path, f"it belongs to user {found.st_uid}, and this process to user {os.geteuid()}")
    if found.st_mode & stat.S_IWOTH:
        raise _refusal(path, f"other users can write to it (mode {stat.S_IMODE(found.st_mode):o})")
    start = os.pread(descriptor, len(_START), 0)
    if not _START.startswith(start):
        raise _refusal(path, "it has other content than the addresses of gateways")


def _refusal(path: Path, why: str) -> ValueError:
    return ValueError(f"file://{path} is refused, and was not changed: {why}; remove it, or choose another path")


def _gateways(descriptor: int) -> dict[str, Any]:
    """Return the entries by job; none if the file is empty, invalid, or just being written."""
    with contextlib.suppress(OSError, ValueError):
        match json_text.loads(os.pread(descriptor, _MAX_BYTES, 0)):
            case {"gateways": dict(gateways)}:
                return gateways
    return {}
