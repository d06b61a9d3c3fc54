"""Names of the files of shared memory, and removal of those whose creators died before they unlinked them."""

from __future__ import annotations

import contextlib
import os
import re
import sys

if sys.platform != "win32":
    import fcntl

JOB_CHARACTERS = 40
NAME = rf"rankmesh-[A-Za-z0-9_.-]{{0,{JOB_CHARACTERS}}}-([0-9]{{1,10}})\.[0-9a-f]{{16}}"
"""Name of a file: the job, the creator's pid, a random number."""


def remove_orphans(directory: str) -> None:
    """Delete the files that this user's processes have left in a directory: they died before they unlinked them."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if re.fullmatch(NAME, entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_orphan(entry.path)


def _remove_orphan(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(descriptor)
