"""Test hosts: network namespaces joined by a bridge, each with its own addresses, name and shared memory.

They take root and iproute2. Where they cannot be made, the tests are skipped with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.host_commands import Hosts, why_not
from support.network_hosts import Host, network_hosts

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))


@pytest.fixture(scope="session")
def _made() -> Iterator[list[Host]]:
    if why := why_not():
        pytest.skip(f"several hosts: {why}")
    with network_hosts(2) as hosts:
        yield hosts


@pytest.fixture
def hosts(_made: list[Host], tmp_path: Path) -> Iterator[Hosts]:
    there = Hosts(_made, tmp_path)
    try:
        yield there
    finally:
        for host in there.addresses:
            there.heal(host)
        there.end()
    assert not there.left()
