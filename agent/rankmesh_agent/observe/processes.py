"""The processes of ranks on this host: by their ids, or below a launcher, with ranks from their environments."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from rankmesh_agent.config.settings import Settings


class RankProcess(NamedTuple):
    """A process that a launcher has given a rank."""

    pid: int
    rank: int
    world_size: int


def rank_of(pid: int) -> RankProcess | None:
    """Return a process with the rank in its environment; None if it has none, has ended, or is another user's."""
    with contextlib.suppress(OSError, ValueError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        found = Settings.from_env({name: value for name, _, value in (entry.partition("=") for entry in entries)})
        if found.rank is not None and found.world_size is not None:
            return RankProcess(pid, found.rank, found.world_size)
    return None


def ranks_below(root: int) -> dict[int, RankProcess]:
    """Return a process if it has a rank, or else its descendants that have one, the closest ones, by rank."""
    found: dict[int, RankProcess] = {}
    todo = [root]
    for pid in todo:
        process = rank_of(pid)
        if process is None:
            todo += _children(pid)
        else:
            found.setdefault(process.rank, process)
    return found


def python_below(pid: int) -> int:
    """Return a process if it runs Python, else its closest descendant that does; itself without any."""
    todo = [pid]
    for each in todo:
        with contextlib.suppress(OSError):
            if os.path.basename(os.readlink(f"/proc/{each}/exe")).startswith("python"):
                return each
        todo += _children(each)
    return pid


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found
