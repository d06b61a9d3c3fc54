"""all_gather over several hosts with several ranks each."""

from __future__ import annotations

from collections.abc import Sequence

from rankmesh_agent.collectives.hierarchical.topology import HierarchicalLink
from rankmesh_agent.collectives.link import Array, as_bytes


def over_hosts(topology: HierarchicalLink, outputs: Sequence[Array], array: Array) -> None:
    """Each rank sends its array to its proxies on the other hosts, directly into their outputs; each shares it there.

    Steps: 1 and 1 exchange a chunk of the longest array, at least 1. Each rank sends its bytes once to every other
    host; each host receives those of the other hosts' ranks once.
    """
    topology.link.arrive()
    local, rank = topology.local, topology.rank
    proxied = topology.proxied[topology.local_rank]
    lanes = topology.max_proxied
    lane = local.slot_bytes // array.itemsize // lanes
    for begin in range(0, max(output.size for output in outputs) or 1, lane):
        chunk = slice(begin, begin + lane)
        mine = as_bytes(array[chunk])
        topology.link.exchange(
            [(topology.proxy(host, rank), mine) for host in topology.other_hosts],
            [(owner, as_bytes(outputs[owner][chunk])) for owner in proxied[1:]],
        )
        slots = local.slots(array.dtype, lane * lanes)
        for number, owner in enumerate(proxied):
            part = array[chunk] if owner == rank else outputs[owner][chunk]
            slots[local.rank][number * lane : number * lane + part.size] = part
        local.step()
        for local_rank, theirs in enumerate(topology.proxied):
            if local_rank != topology.local_rank:
                for number, owner in enumerate(theirs):
                    wanted = outputs[owner][chunk]
                    wanted[:] = slots[local_rank][number * lane : number * lane + wanted.size]
    outputs[rank][:] = array
