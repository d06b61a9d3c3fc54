"""broadcast over several hosts with several ranks each."""

from __future__ import annotations

from rankmesh_agent.collectives.hierarchical.hosts import HierarchicalLink
from rankmesh_agent.collectives.link import Array, as_bytes, chunks, shards


def over_hosts(hosts: HierarchicalLink, array: Array, root: int) -> None:
    """The root writes; its host's carriers scatter it over the other hosts, which all-gather; there all read.

    Steps: 1 and 1 exchange a chunk, and 1 more for three hosts and more. The root's host sends the array's bytes once,
    however many hosts there are; each other host receives them once, and sends (hosts - 2) / (hosts - 1) of them on.
    """
    hosts.link.all_exchange()
    parts = chunks(array.size, hosts.local.slot_bytes // array.itemsize)
    if hosts.host_of(root) == hosts.host:
        _spread(hosts, array, root, parts)
    else:
        _collect(hosts, array, hosts.host_of(root), parts)


def _spread(hosts: HierarchicalLink, array: Array, root: int, parts: list[slice]) -> None:
    """Do the part of the root's host."""
    place = hosts.local_ranks.index(root)
    for chunk in parts:
        part = array[chunk]
        shown = hosts.local.slots(array.dtype, part.size)[place]
        if hosts.rank == root:
            shown[:] = part
        hosts.local.step()
        if hosts.rail:
            share = shown[shards(part.size, hosts.leaders)[hosts.local_rank]]
            split = shards(share.size, len(hosts.other_hosts))
            hosts.link.exchange(
                [
                    (hosts.rail[host], as_bytes(share[piece]))
                    for host, piece in zip(hosts.other_hosts, split, strict=True)
                ],
                [],
            )
        if hosts.rank != root:
            part[:] = shown


def _collect(hosts: HierarchicalLink, array: Array, source: int, parts: list[slice]) -> None:
    """Do the part of another host: while a chunk's pieces come from the source, the hosts exchange the one before."""
    local, column = hosts.local, hosts.rail
    receivers = [host for host in range(len(hosts.layout)) if host != source]
    peers = [host for host in hosts.other_hosts if host != source]
    lag = 1 if peers else 0
    for turn in range(len(parts) + lag):
        if column:
            sends, receives = [], []
            if turn < len(parts):
                receives += [(column[source], as_bytes(_pieces(hosts, array[parts[turn]], receivers)[hosts.host]))]
            if lag and turn:
                split = _pieces(hosts, array[parts[turn - 1]], receivers)
                sends += [(column[peer], as_bytes(split[hosts.host])) for peer in peers]
                receives += [(column[peer], as_bytes(split[peer])) for peer in peers]
            hosts.link.exchange(sends, receives)
        if turn < lag:
            continue
        part = array[parts[turn - lag]]
        split_here = shards(part.size, hosts.leaders)
        slots = local.slots(array.dtype, part.size)
        if column:
            slots[local.rank][split_here[hosts.local_rank]] = part[split_here[hosts.local_rank]]
        local.step()
        for owner, share in enumerate(split_here):
            if owner != hosts.local_rank:
                part[share] = slots[owner][share]


def _pieces(hosts: HierarchicalLink, part: Array, receivers: list[int]) -> dict[int, Array]:
    """Return what each receiving host's carrier of this column gets from the source."""
    share = part[shards(part.size, hosts.leaders)[hosts.local_rank]]
    split = shards(share.size, len(receivers))
    return {host: share[piece] for host, piece in zip(receivers, split, strict=True)}
