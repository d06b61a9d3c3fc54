"""Removal of the shared memory files that a crashed job leaves behind."""

from __future__ import annotations

import contextlib
import os


def remove_segments(directory: str, job: str) -> None:
    """Delete the shared memory files of a job that has no process left; only regular files of this user."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(f"rankmesh-{job}-") and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        os.unlink(entry.path)
