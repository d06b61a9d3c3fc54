"""Limit of open file descriptors: raised when a process starts, and named by the errors of one that has reached it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator

from rankmesh_agent.net.rate_limit import WarningInterval
from rankmesh_agent.wire.errors import DistNetworkError

if sys.platform != "win32":
    import resource

_log = logging.getLogger("rankmesh")
_warning = WarningInterval()
_latest = 0.0, ""
"""Time and text of the latest warning."""


class DescriptorLimitError(DistNetworkError, code="descriptor-limit", status=503):
    """This process, or its machine, has no more file descriptors."""


def raise_limit() -> Callable[[], None]:
    """Raise the soft limit of open descriptors to the hard one; return a function that restores it in a child.

    The soft limit, mostly 1024, protects programs that call ``select``, whose sets have room for as many. The kernel
    gives out the lowest free number, so a higher limit changes nothing for a process with fewer descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def restore() -> None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return restore


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether the cause of an error is that this process, or the machine, has no free descriptor."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def reason(error: BaseException) -> str:
    """Return the reason of an error of the system, with the limit and the remedy if there is no free descriptor."""
    if not is_exhausted(error):
        return getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) == errno.ENFILE:
        return "this machine has no free file descriptor (ENFILE): raise fs.file-max, sysctl -w fs.file-max=1000000"
    return f"this process has no free file descriptor (EMFILE): {limit_text()}"


def limit_text() -> str:
    """Return the limit, how many descriptors are in use, and how to raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd")) - 1
    except OSError:  # it takes a descriptor: all are in use
        used = soft
    soft_text, hard_text = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    return (
        f"RLIMIT_NOFILE is {soft_text} (hard limit {hard_text}), {used} are in use; raise it with ulimit -n "
        "65536 (ulimit -Hn for the hard limit), LimitNOFILE= of systemd, or docker run --ulimit nofile=65536:65536"
    )


@contextlib.contextmanager
def convert_emfile(subject: str) -> Iterator[None]:
    """Raise DescriptorLimitError, whose text begins with ``subject``, where a block fails for want of descriptors."""
    try:
        yield
    except (OSError, ImportError, DistNetworkError) as error:
        raise_if_exhausted(error, subject)
        raise


def raise_if_exhausted(error: BaseException, subject: str) -> None:
    """Raise DescriptorLimitError if the cause of an error is that no descriptor is free; see ``convert_emfile``."""
    if isinstance(error, DescriptorLimitError):
        raise error
    if is_exhausted(error):
        raise DescriptorLimitError(f"{subject}: {reason(error)}") from error


def warn_exhausted(subject: str, error: BaseException) -> None:
    """Log that something has to wait for a free descriptor, at most once a minute in this process."""
    note_exhausted(f"{subject}: {reason(error)}")
    if _warning.is_due():
        _log.warning("%s: %s", subject, reason(error))


def log_failure(subject: str, error: Exception) -> None:
    """Log an error of one step of a background loop, which goes on; at most once a minute if no descriptor is free."""
    if is_exhausted(error):
        warn_exhausted(subject, error)
    else:
        _log.error(subject, exc_info=error)


def note_exhausted(text: str) -> None:
    """Record what has to wait for a free descriptor, in this process or in one that it has started."""
    global _latest
    _latest = time.monotonic(), text


def exhausted_since(since: float) -> str:
    """Return what has had to wait for a free descriptor since a time, with limit and remedy; empty if nothing has."""
    at, text = _latest
    return text if at > since else ""
