"""Layout of a group over hosts, and the link of its hierarchical algorithms."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.link import Exchange, Link
from rankmesh_agent.collectives.rounds import distances
from rankmesh_agent.transports.segment import Segment

Layout = tuple[tuple[int, ...], ...]
"""The group ranks on each host. Hosts come in the order of their first member, the members of a host in rank order."""


def layout_of(hosts: Sequence[Hashable]) -> Layout:
    """Return the layout of a group.

    Args:
        hosts: a host identity for each group rank, equal for ranks that can share memory.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return tuple(map(tuple, members.values()))


class LeaderLink(Link):
    """The Link among one rank of each host, numbered by host.

    Args:
        link: messages among all members.
        leaders: the rank of each host; the other ranks may not use this link.
        host: number of this rank's host.
    """

    def __init__(self, link: Link, leaders: Sequence[int], host: int) -> None:
        self.rank = host
        self.size = len(leaders)
        self._link = link
        self._leaders = leaders

    def arrive(self) -> None:
        """See Link."""
        for distance in distances(self.size):
            self.step((self.rank + distance) % self.size, b"", (self.rank - distance) % self.size)

    def step(self, to: int | None, payload: memoryview | bytes, source: int | None) -> memoryview | bytes:
        """See Link."""
        return self._link.step(
            None if to is None else self._leaders[to], payload, None if source is None else self._leaders[source]
        )

    def start(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> Exchange:
        """See Link."""
        return self._link.start(
            [(self._leaders[host], view) for host, view in sends],
            [(self._leaders[host], view) for host, view in receives],
        )

    def finish(self, exchange: Exchange) -> None:
        """See Link."""
        self._link.finish(exchange)

    def scratch(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See Link."""
        return self._link.scratch(nbytes)


class HierarchicalLink:
    """Communication of a group on several hosts: its Link, and the shared memory of this rank's host.

    Each host has as many *leaders* as the smallest host has members. The leaders with the same local rank on their
    hosts form a *rail*. The rails split the bytes of an array, so that every rank of the smallest host carries its
    share of the traffic between hosts, and each byte passes between two ranks only.

    Args:
        link: messages among all members.
        local: shared memory of this host's members, in their order; of this rank alone if it is the only member there.
        layout: group ranks on each host.

    Attributes:
        link: as above.
        local: as above.
        layout: as above.
        rank: this rank in the group.
        size: ranks in the group.
        host: number of this rank's host.
        local_ranks: group ranks on this host.
        local_rank: position of this rank in ``local_ranks``, and its rank in ``local``.
        leaders: number of leaders on each host.
        leader_link: messages among the first ranks of the hosts.
        rail: ranks of this rank's rail, by host; empty if this rank is not a leader.
        rail_link: messages along this rank's rail; None if this rank is not a leader.
        other_hosts: numbers of the other hosts.
        proxied: for each member on this host, the ranks that it is the proxy of: itself, then ranks of other hosts.
        max_proxied: the largest number of ranks that one rank is the proxy of, on any host.
    """

    def __init__(self, link: Link, local: Segment, layout: Layout) -> None:
        self.link = link
        self.rank = link.rank
        self.size = link.size
        self.local = local
        self.layout = layout
        self._positions = {rank: (host, local) for host, ranks in enumerate(layout) for local, rank in enumerate(ranks)}
        self.host, self.local_rank = self._positions[self.rank]
        self.local_ranks = layout[self.host]
        self.leaders = min(map(len, layout))
        self.leader_link = LeaderLink(link, [ranks[0] for ranks in layout], self.host)
        self.rail = [ranks[self.local_rank] for ranks in layout] if self.local_rank < self.leaders else []
        self.rail_link = LeaderLink(link, self.rail, self.host) if self.rail else None
        self.other_hosts = [host for host in range(len(layout)) if host != self.host]
        self.proxied = [[rank] for rank in self.local_ranks]
        for rank in range(self.size):
            if self.host_of(rank) != self.host:
                self.proxied[self._positions[rank][1] % len(self.local_ranks)].append(rank)
        # The first rank of the smallest host is the proxy of the most ranks.
        self.max_proxied = sum(-(-len(ranks) // self.leaders) for ranks in layout)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self._positions[rank][0]

    def proxy(self, host: int, rank: int) -> int:
        """Return the proxy of ``rank`` on a host: itself on its own host, elsewhere a rank of similar position."""
        local_ranks = self.layout[host]
        return local_ranks[self._positions[rank][1] % len(local_ranks)]
