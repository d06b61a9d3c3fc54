"""Identity of this host."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
