"""Removal of the shared memory files that a crashed job leaves behind."""

from __future__ import annotations

import contextlib
import os
import stat


def remove_segments(directory: str, job: str) -> None:
    """Delete the shared memory files of a job that has no process left; only regular files of this user."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(f"rankmesh-{job}-"):
                _delete_own_file(entry.path)


def _delete_own_file(path: str) -> None:
    with contextlib.suppress(OSError):
        about = os.lstat(path)
        if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
            os.unlink(path)
