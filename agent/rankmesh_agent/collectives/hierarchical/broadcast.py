"""broadcast over several hosts with several ranks each."""

from __future__ import annotations

from rankmesh_agent.collectives.broadcast import tree_scatter_link
from rankmesh_agent.collectives.hierarchical.topology import HierarchicalLink
from rankmesh_agent.collectives.link import FEW_RANKS, Array, as_bytes, chunks, shards


def over_hosts(topology: HierarchicalLink, array: Array, root: int) -> None:
    """The root writes to shared memory; its host's leaders scatter to the other hosts, which all-gather and share.

    Steps: 1 and 1 exchange a chunk, and 1 more for three hosts and more. The root's host sends the array's bytes once,
    for any number of hosts; each other host receives them once, and sends (hosts - 2) / (hosts - 1) of them on. Among
    many hosts, 4 log2 hosts exchanges a chunk, in which each host sends its bytes at most twice.
    """
    topology.link.arrive()
    parts = chunks(array.size, topology.local.slot_bytes // array.itemsize)
    if len(topology.layout) > FEW_RANKS:
        _along_rails(topology, array, root, parts)
    elif topology.host_of(root) == topology.host:
        _send_from_root_host(topology, array, root, parts)
    else:
        _receive_on_other_host(topology, array, topology.host_of(root), parts)


def _along_rails(topology: HierarchicalLink, array: Array, root: int, parts: list[slice]) -> None:
    """Run the part of any rank among many hosts: each rail scatters and gathers its share of a chunk."""
    local, root_host = topology.local, topology.host_of(root)
    here = topology.host == root_host
    for chunk in parts:
        part = array[chunk]
        split = shards(part.size, topology.leaders)
        slots = local.slots(array.dtype, part.size)
        if here:
            slots = [slots[topology.local_ranks.index(root)]] * len(slots)
            if topology.rank == root:
                slots[0][:] = part
            local.step()
        if topology.rail_link is not None:
            mine = slots[topology.local_rank][split[topology.local_rank]]
            tree_scatter_link(topology.rail_link, mine, root_host)
        if not here:
            local.step()
        if topology.rank != root:
            for owner, share in enumerate(split):
                part[share] = slots[owner][share]


def _send_from_root_host(topology: HierarchicalLink, array: Array, root: int, parts: list[slice]) -> None:
    """Run the part of a rank on the root's host."""
    root_local_rank = topology.local_ranks.index(root)
    for chunk in parts:
        part = array[chunk]
        slot = topology.local.slots(array.dtype, part.size)[root_local_rank]
        if topology.rank == root:
            slot[:] = part
        topology.local.step()
        if topology.rail:
            share = slot[shards(part.size, topology.leaders)[topology.local_rank]]
            split = shards(share.size, len(topology.other_hosts))
            topology.link.exchange(
                [
                    (topology.rail[host], as_bytes(share[piece]))
                    for host, piece in zip(topology.other_hosts, split, strict=True)
                ],
                [],
            )
        if topology.rank != root:
            part[:] = slot


def _receive_on_other_host(topology: HierarchicalLink, array: Array, source: int, parts: list[slice]) -> None:
    """Run the part of a rank on another host: receive a chunk's pieces while the hosts exchange those before."""
    local, rail = topology.local, topology.rail
    receivers = [host for host in range(len(topology.layout)) if host != source]
    peers = [host for host in topology.other_hosts if host != source]
    lag = 1 if peers else 0
    for turn in range(len(parts) + lag):
        if rail:
            sends, receives = [], []
            if turn < len(parts):
                receives += [(rail[source], as_bytes(_pieces(topology, array[parts[turn]], receivers)[topology.host]))]
            if lag and turn:
                split = _pieces(topology, array[parts[turn - 1]], receivers)
                sends += [(rail[peer], as_bytes(split[topology.host])) for peer in peers]
                receives += [(rail[peer], as_bytes(split[peer])) for peer in peers]
            topology.link.exchange(sends, receives)
        if turn < lag:
            continue
        part = array[parts[turn - lag]]
        split_here = shards(part.size, topology.leaders)
        slots = local.slots(array.dtype, part.size)
        if rail:
            slots[local.rank][split_here[topology.local_rank]] = part[split_here[topology.local_rank]]
        local.step()
        for owner, share in enumerate(split_here):
            if owner != topology.local_rank:
                part[share] = slots[owner][share]


def _pieces(topology: HierarchicalLink, part: Array, receivers: list[int]) -> dict[int, Array]:
    """Return the pieces that the source sends to the leaders of this rail, by receiving host."""
    share = part[shards(part.size, topology.leaders)[topology.local_rank]]
    split = shards(share.size, len(receivers))
    return {host: share[piece] for host, piece in zip(receivers, split, strict=True)}
