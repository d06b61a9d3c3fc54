"""The processes that hold a rank's output open: the rank's children, which it has left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

from rankmesh_agent.wire.printable import printable

_MAX_COMMAND = 80


def holders(pipes: Collection[int]) -> list[int]:
    """Return the ids of the other processes of this user that have one of these pipes open, by inode."""
    links = {f"pipe:[{inode}]" for inode in pipes}
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return sorted(pid for pid in pids if pid != os.getpid() and not links.isdisjoint(_links(pid)))


def command_of(pid: int) -> str:
    """Return the command line of a process and its id: ``rsync -a out host: (pid 4711)``."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # it has ended
        words = []
    command = printable(b" ".join(words).decode(errors="replace").strip())
    return f"{command[:_MAX_COMMAND] or 'a process'} (pid {pid})"


def _links(pid: int) -> Iterator[str]:
    """Yield what the descriptors of a process refer to; nothing if it has ended, or is another user's."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(f"{folder}/{name}")
