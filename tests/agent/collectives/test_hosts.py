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


def everyones(hosts: str) -> list[HierarchicalLink]:
    """Return each rank's Hosts."""
    nothing: Any = None
    return [HierarchicalLink(NoLink(rank, len(hosts)), nothing, layout_of(hosts)) for rank in range(len(hosts))]  # type: ignore[arg-type]


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


def test_columns_are_as_many_as_the_smallest_host_has_ranks() -> None:
    ranks = everyones("aaaabbbcc")
    first, second = [0, 4, 7], [1, 5, 8]
    assert [each.rail for each in ranks] == [first, second, [], [], first, second, [], first, second]
    assert {each.leaders for each in ranks} == {2}
    assert [each.local_rank for each in ranks] == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert [each.other_hosts for each in ranks[3:5]] == [[1, 2], [0, 2]]


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcc", "aaaabbbcc", "abab", "abcabca", "ab"])
def test_every_rank_is_served_by_one_leader_of_its_host(hosts: str) -> None:
    topology = everyones(hosts)[0]
    served = [topology.served(leader) for leader in range(topology.leaders)]
    assert sorted(rank for hosts in served for ranks in hosts for rank in ranks) == list(range(len(hosts)))
    for leader, hosts_of_leader in enumerate(served):
        for host, ranks in enumerate(hosts_of_leader):
            assert ranks[0] == topology.layout[host][leader]
            assert {topology.host_of(rank) for rank in ranks} == {host}


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
