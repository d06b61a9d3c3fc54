"""Ranks over each medium: shared memory, TCP, and several hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import hosting

OnHosts = Callable[..., Callable[[int], dict[str, str]]]


@pytest.fixture
def on(tmp_path: Path) -> OnHosts:
    """Return a function that puts ranks on hosts, by a letter for each rank.

    A host is a directory for shared memory: ranks with different RANKMESH_SHM_DIR share none.
    """

    def place(hosts: str, **variables: str) -> Callable[[int], dict[str, str]]:
        if hosting.ATTACHED and len(set(hosts)) > 1:
            pytest.skip("the agents of a cluster share one directory")
        for host in set(hosts):
            (tmp_path / f"shm-{host}").mkdir()
        return lambda rank: {"RANKMESH_SHM_DIR": str(tmp_path / f"shm-{hosts[rank]}"), **variables}

    return place


@pytest.fixture
def over(on: OnHosts) -> Callable[[str], dict[str, str] | Callable[[int], dict[str, str]]]:
    """Return a function that gives the variables of ranks over ``shm`` or ``tcp``, or on the hosts given by letters."""
    return lambda medium: {"RANKMESH_TRANSPORT": medium} if medium in ("shm", "tcp") else on(medium)
