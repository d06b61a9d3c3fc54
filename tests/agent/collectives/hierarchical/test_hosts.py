"""Who shares a host with whom."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.collectives.hierarchical.hosts import Hosts, layout_of


class NoLink:
    """As much of a Link as Hosts needs to be made."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def everyones(hosts: str) -> list[Hosts]:
    """Return each rank's Hosts."""
    nothing: Any = None
    return [Hosts(NoLink(rank, len(hosts)), nothing, layout_of(hosts)) for rank in range(len(hosts))]  # type: ignore[arg-type]


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
    assert [each.column for each in ranks] == [first, second, [], [], first, second, [], first, second]
    assert {each.carriers for each in ranks} == {2}
    assert [each.place for each in ranks] == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert [each.elsewhere for each in ranks[3:5]] == [[1, 2], [0, 2]]


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcc", "aaaabbbcc", "abab", "abcabca", "ab"])
def test_every_rank_is_stood_for_once_on_every_host(hosts: str) -> None:
    ranks = everyones(hosts)
    for each in ranks:
        assert sorted(rank for desk in each.desks for rank in desk) == list(range(len(hosts)))
        assert each.desks[each.place][0] == each.rank
        assert max(map(len, each.desks)) <= each.widest_desk
        for place, desk in enumerate(each.desks):
            assert all(each.deputy(each.host, rank) == each.here[place] for rank in desk)
    assert len({each.widest_desk for each in ranks}) == 1
    smallest = min(hosts.count(host) for host in hosts)
    assert ranks[0].widest_desk <= 1 + sum(-(-hosts.count(host) // smallest) for host in set(hosts))
