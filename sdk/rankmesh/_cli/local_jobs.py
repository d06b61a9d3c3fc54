"""The jobs that this user runs on this host, as the environment of their ranks says it.

The launcher makes a token and takes a free port of its own, and tells its ranks. So a person in another terminal need
not be told either: the kernel shows a process's environment to the user whose process it is, and to nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rankmesh_agent.config.settings import Settings

_PROC = Path("/proc")


class Nearby(NamedTuple):
    """A gateway that ranks on this host have.

    Attributes:
        gateway: its URL.
        token: the job's token.
        job: the job's name.
    """

    gateway: str
    token: str
    job: str


def nearby(proc: Path = _PROC) -> list[Nearby]:
    """Return what this user's ranks on this host belong to, by job.

    Args:
        proc: where the kernel shows its processes.
    """
    return sorted(set(_seen(proc)), key=lambda found: found.job)


def _seen(proc: Path) -> Iterator[Nearby]:
    me = os.geteuid()
    for folder in proc.iterdir() if proc.is_dir() else ():
        if not folder.name.isdecimal():
            continue
        try:
            file = folder / "environ"
            if file.stat().st_uid != me:
                continue
            said = Settings.from_env(dict(_variables(file.read_bytes())))
        except (OSError, ValueError):  # it has ended, or is none of ours
            continue
        if said.gateway and said.rank is not None and said.job != Settings.job:
            yield Nearby(said.gateway.rstrip("/"), said.token, said.job)


def _variables(environ: bytes) -> Iterator[tuple[str, str]]:
    for entry in environ.split(b"\0"):
        name, found, value = entry.decode(errors="replace").partition("=")
        if found:
            yield name, value
