"""broadcast over several hosts with several ranks each."""

from __future__ import annotations

from rankmesh_agent.collectives.hierarchical.hosts import Hosts
from rankmesh_agent.collectives.link import Array, octets, pieces, shares


def over_hosts(hosts: Hosts, array: Array, root: int) -> None:
    """The root writes; its host's carriers scatter it over the other hosts, which all-gather; there all read.

    Steps: 1 and 1 exchange a chunk, and 1 more for three hosts and more. The root's host sends the array's bytes once,
    however many hosts there are; each other host receives them once, and sends (hosts - 2) / (hosts - 1) of them on.
    """
    hosts.link.enter()
    chunks = pieces(array.size, hosts.local.slot_bytes // array.itemsize)
    if hosts.host_of(root) == hosts.host:
        _spread(hosts, array, root, chunks)
    else:
        _collect(hosts, array, hosts.host_of(root), chunks)


def _spread(hosts: Hosts, array: Array, root: int, chunks: list[slice]) -> None:
    """Do the part of the root's host."""
    place = hosts.here.index(root)
    for chunk in chunks:
        part = array[chunk]
        shown = hosts.local.slots(array.dtype, part.size)[place]
        if hosts.rank == root:
            shown[:] = part
        hosts.local.step()
        if hosts.column:
            share = shown[shares(part.size, hosts.carriers)[hosts.place]]
            split = shares(share.size, len(hosts.elsewhere))
            hosts.link.exchange(
                [
                    (hosts.column[host], octets(share[piece]))
                    for host, piece in zip(hosts.elsewhere, split, strict=True)
                ],
                [],
            )
        if hosts.rank != root:
            part[:] = shown


def _collect(hosts: Hosts, array: Array, source: int, chunks: list[slice]) -> None:
    """Do the part of another host: while a chunk's pieces come from the source, the hosts exchange the one before."""
    local, column = hosts.local, hosts.column
    receivers = [host for host in range(len(hosts.layout)) if host != source]
    peers = [host for host in hosts.elsewhere if host != source]
    lag = 1 if peers else 0
    for turn in range(len(chunks) + lag):
        if column:
            sends, receives = [], []
            if turn < len(chunks):
                receives += [(column[source], octets(_pieces(hosts, array[chunks[turn]], receivers)[hosts.host]))]
            if lag and turn:
                split = _pieces(hosts, array[chunks[turn - 1]], receivers)
                sends += [(column[peer], octets(split[hosts.host])) for peer in peers]
                receives += [(column[peer], octets(split[peer])) for peer in peers]
            hosts.link.exchange(sends, receives)
        if turn < lag:
            continue
        part = array[chunks[turn - lag]]
        split_here = shares(part.size, hosts.carriers)
        slots = local.slots(array.dtype, part.size)
        if column:
            slots[local.rank][split_here[hosts.place]] = part[split_here[hosts.place]]
        local.step()
        for owner, share in enumerate(split_here):
            if owner != hosts.place:
                part[share] = slots[owner][share]


def _pieces(hosts: Hosts, part: Array, receivers: list[int]) -> dict[int, Array]:
    """Return what each receiving host's carrier of this column gets from the source."""
    share = part[shares(part.size, hosts.carriers)[hosts.place]]
    split = shares(share.size, len(receivers))
    return {host: share[piece] for host, piece in zip(receivers, split, strict=True)}
