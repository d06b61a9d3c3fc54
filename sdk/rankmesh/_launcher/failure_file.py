"""File in which ranks, and processes of ``spawn``, report their failures to the process that has started them.

The rank that exits first is not always the one that failed first. The launcher, or the parent of ``spawn``, keeps an
anonymous file in memory, which leaves nothing behind; the ranks find its path in RANKMESH_FAILURE_FILE.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, NamedTuple

VARIABLE = "RANKMESH_FAILURE_FILE"
"""Environment variable with the path of the file."""
_NAME = "rankmesh-failures"


class FailureReport(NamedTuple):
    """Report of a rank that leaves its job after a failure: with the line of the user's code, if there is one."""

    rank: int
    pid: int
    failed_ranks: list[int]
    place: str = ""

    def write(self, path: str) -> None:
        """Append the report to a launcher's file. Does nothing if that is gone, or another file."""
        _append(path, "rank", self)


class ChildError(NamedTuple):
    """The failure of a process of ``spawn``; traceback and line of the exception are empty for ``sys.exit``."""

    process: int
    code: int
    trace: str
    place: str = ""

    def write(self, path: str) -> None:
        """Append the error to the parent's file."""
        _append(path, "child", self)


class FailureFile:
    """The file, in the launcher's process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME)
        self._content = b""

    @property
    def path(self) -> str:
        """The file's path for other processes."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def reports(self) -> list[FailureReport]:
        """Return the ranks' reports so far, the earliest first."""
        return [FailureReport(*fields) for fields in self._records("rank")]

    def errors(self) -> dict[int, ChildError]:
        """Return the errors of processes so far, by index, the earliest first."""
        return {fields[0]: ChildError(*fields) for fields in self._records("child")}

    def close(self) -> None:
        """Close the file but keep its content. Idempotent."""
        if self._fd >= 0:
            self._content = self._read()
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> bytes:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0) if self._fd >= 0 else self._content

    def _records(self, kind: str) -> list[Any]:
        lines = self._read().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]  # another may be being written
        return [fields for name, fields in records if name == kind]


def _append(path: str, kind: str, fields: tuple[Any, ...]) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended, or has another numbering of processes
        if os.readlink(path).startswith(f"/memfd:{_NAME}"):
            with open(path, "ab", buffering=0) as file:
                file.write(json.dumps([kind, fields]).encode() + b"\n")
