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


def _make(count: int) -> Iterator[list[Host]]:
    if why := why_not():
        pytest.skip(f"several hosts: {why}")
    with network_hosts(count) as hosts:
        yield hosts


def _lend(made: list[Host], folder: Path) -> Iterator[Hosts]:
    there = Hosts(made, folder)
    try:
        yield there
    finally:
        for host in there.addresses:
            there.heal(host)
        there.end()
    assert not there.left()


@pytest.fixture(scope="session")
def _two() -> Iterator[list[Host]]:
    yield from _make(2)


@pytest.fixture
def hosts(_two: list[Host], tmp_path: Path) -> Iterator[Hosts]:
    yield from _lend(_two, tmp_path)


@pytest.fixture(scope="session")
def _three() -> Iterator[list[Host]]:
    yield from _make(3)


@pytest.fixture
def three_hosts(_three: list[Host], tmp_path: Path) -> Iterator[Hosts]:
    yield from _lend(_three, tmp_path)
