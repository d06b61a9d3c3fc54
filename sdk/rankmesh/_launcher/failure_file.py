"""File in which ranks report to their launcher which other ranks' failures have ended their groups.

The rank that exits first is not always the one that failed first. The launcher, or the parent of ``spawn``, keeps an
anonymous file in memory, which leaves nothing behind; the ranks find its path in RANKMESH_FAILURE_FILE.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

VARIABLE = "RANKMESH_FAILURE_FILE"
"""Environment variable with the path of the file."""
_NAME = "rankmesh-failures"


class FailureReport(NamedTuple):
    """What a rank reports when it leaves its job after a failure.

    Attributes:
        rank: the rank.
        pid: its process id.
        failed_ranks: the other ranks that its first failure names.
        place: the line of the user's code with its exception; empty without one.
    """

    rank: int
    pid: int
    failed_ranks: list[int]
    place: str = ""

    def write(self, path: str) -> None:
        """Append the report to a launcher's file. Does nothing if that is gone, or another file."""
        with contextlib.suppress(OSError):  # the launcher has ended, or has another numbering of processes
            if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                with open(path, "ab", buffering=0) as file:
                    file.write(json.dumps(self).encode() + b"\n")


class FailureFile:
    """The file, in the launcher's process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME)

    @property
    def path(self) -> str:
        """The file's path for other processes."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def reports(self) -> list[FailureReport]:
        """Return the reports so far, the earliest first."""
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        return [FailureReport(*json.loads(line)) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
