"""Launchers in a folder of their own, with shared memory there: nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launchers import Launchers


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    (tmp_path / "shm").mkdir()
    launchers = Launchers(tmp_path)
    yield launchers
    for launcher in launchers.started:
        if launcher.poll() is None:
            launcher.kill()
        launcher.communicate()
    assert list((tmp_path / "shm").iterdir()) == []
