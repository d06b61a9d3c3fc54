"""Ranks as processes, and a world of one rank in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Ranks

import rankmesh as dist


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is rank 0 of 1."""
    path = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group(init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
