"""A rank holds no more after many joins and calls than after a few; ``tools.faults.endurance`` has the long run."""

from __future__ import annotations

import pytest

from tools.faults.endurance import Held, growth, measure

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("medium", ["shm", "tcp"])
@pytest.mark.parametrize(("what", "count"), [("cycles", 12), ("collectives", 4000)])
def test_nothing_grows(what: str, count: int, medium: str) -> None:
    for found in measure(what, count, 4, medium):
        assert not growth(found, allowed_kib=16 << 10), found


def test_growth_is_found() -> None:
    first = Held(10, 5, 2, 300, 40_000)
    assert growth([first, first._replace(done=20)]) == []
    assert growth([first, first._replace(done=20, descriptors=6)]) == ["descriptors: 5 after 10, 6 after 20"]
    assert growth([first, Held(20, 5, 3, 300, 50_000)]) == [
        "threads: 2 after 10, 3 after 20",
        "memory: 40000 KiB after 10, 50000 KiB after 20",
    ]
