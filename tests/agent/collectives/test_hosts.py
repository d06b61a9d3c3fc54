"""Who shares a host with whom."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rankmesh_agent.collectives.hosts import HierarchicalLink, layout_of


class NoLink:
    """As much of a Link as Hosts needs to be made."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("hosts", "layout"),
    [
        ("a", ((0,),)),
        ("aabb", ((0, 1), (2, 3))),
        ("baab", ((0, 3), (1, 2))),
        ("abcabca", ((0, 3, 6), (1, 4), (2, 5))),
    ],
)
def test_hosts_come_in_the_order_of_their_first_ranks(hosts: str, layout: Any) -> None:
    assert layout_of(hosts) == layout


def test_a_rank_looks_at_each_rank_once() -> None:
    """Not once for each host: a group of 4 096 ranks on 512 hosts would take seconds."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    nothing: Any = None
    layout = layout_of([rank // 8 for rank in range(1024)])
    sys.setprofile(count)
    try:
        HierarchicalLink(NoLink(5, 1024), nothing, layout)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert calls < 20 * 1024
