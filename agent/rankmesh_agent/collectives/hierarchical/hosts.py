"""Layout of a group over hosts, and the link that its hierarchical algorithms run over."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.transports.segment import Segment

Layout = tuple[tuple[int, ...], ...]
"""The group ranks on each host. Hosts come in the order of their first member, a host's members in rank order."""


def layout_of(hosts: Sequence[Hashable]) -> Layout:
    """Return the layout of a group.

    Args:
        hosts: what is equal for ranks that can share memory, by group rank.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return tuple(map(tuple, members.values()))


class HierarchicalLink:
    """What a group on several hosts communicates over: its Link, and the shared memory of this rank's host.

    As many members of each host as the smallest host has are its *leaders*. The leaders with the same local rank on
    their hosts form a *rail*: an array's bytes are split among the rails, so that every rank of the smallest host
    does its share of what passes between hosts, and each byte passes between two ranks only.

    Args:
        link: messages among all members.
        local: the shared memory of this host's members, in their order; of this rank alone where it has no others.
        layout: which ranks are on which host.

    Attributes:
        link: as above.
        local: as above.
        layout: as above.
        rank: this rank in the group.
        size: ranks in the group.
        host: number of this rank's host.
        local_ranks: the group ranks on it.
        local_rank: this rank's position among them, which is its rank in ``local``.
        leaders: number of leaders on each host.
        rail: the ranks of this rank's rail, by host; empty if it is no leader.
        other_hosts: the numbers of the other hosts.
        proxied: for each of this host's members, the ranks it is the proxy of: itself, then some of other hosts.
        max_proxied: the largest number of ranks that one rank is the proxy of, on any host.
    """

    def __init__(self, link: Link, local: Segment, layout: Layout) -> None:
        self.link = link
        self.rank = link.rank
        self.size = link.size
        self.local = local
        self.layout = layout
        self._homes = {rank: (host, place) for host, ranks in enumerate(layout) for place, rank in enumerate(ranks)}
        self.host, self.local_rank = self._homes[self.rank]
        self.local_ranks = layout[self.host]
        self.leaders = min(map(len, layout))
        self.rail = [ranks[self.local_rank] for ranks in layout] if self.local_rank < self.leaders else []
        self.other_hosts = [host for host in range(len(layout)) if host != self.host]
        proxied = [self._proxied_on(host) for host in range(len(layout))]
        self.desks = proxied[self.host]
        self.max_proxied = max(len(desk) for host in proxied for desk in host)

    def _proxied_on(self, host: int) -> list[list[int]]:
        others = [rank for rank in range(self.size) if self.host_of(rank) != host]
        return [[mine, *(rank for rank in others if self.proxy(host, rank) == mine)] for mine in self.layout[host]]

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self._homes[rank][0]

    def proxy(self, host: int, rank: int) -> int:
        """Return the proxy of ``rank`` on a host: itself on its own host, elsewhere a rank of similar position."""
        there = self.layout[host]
        return there[self._homes[rank][1] % len(there)]
