"""The jobs of this user on this host, from the environment of their ranks.

The launcher passes a random token and a free port to its ranks. Commands in another terminal find both there: the
kernel shows the environment of a process to its own user alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rankmesh_agent.config.settings import Settings

_PROC = Path("/proc")


class LocalJob(NamedTuple):
    """The gateway of a job with ranks on this host.

    Attributes:
        gateway: its URL.
        token: the job's token.
        job: the job's name.
    """

    gateway: str
    token: str
    job: str


def local_jobs(proc: Path = _PROC) -> list[LocalJob]:
    """Return the jobs of this user's ranks on this host, sorted by name.

    Args:
        proc: mount point of procfs.
    """
    return sorted(set(_scan(proc)), key=lambda found: found.job)


def _scan(proc: Path) -> Iterator[LocalJob]:
    for folder in proc.iterdir() if proc.is_dir() else ():  # Linux alone has it
        if not folder.name.isdecimal():
            continue
        try:
            file = folder / "environ"
            if file.stat().st_uid != os.geteuid():
                continue
            entries = (entry.partition("=") for entry in file.read_bytes().decode(errors="replace").split("\0"))
            found = Settings.from_env({name: value for name, equals, value in entries if equals})
        except (OSError, ValueError):  # ended, or not a rank
            continue
        if found.gateway and found.rank is not None and found.job != Settings.job:
            yield LocalJob(found.gateway.rstrip("/"), found.token, found.job)
