"""all_gather over several hosts with several ranks each."""

from __future__ import annotations

from collections.abc import Sequence

from rankmesh_agent.collectives.hierarchical.hosts import HierarchicalLink
from rankmesh_agent.collectives.link import Array, as_bytes


def over_hosts(hosts: HierarchicalLink, outputs: Sequence[Array], array: Array) -> None:
    """Everyone sends its array to one rank of every other host, straight into its output, and that shows it to all.

    Steps: 1 and 1 exchange a chunk of the longest array, at least 1. Each rank sends its bytes once to every other
    host; each host receives those of the other hosts' ranks once.
    """
    hosts.link.all_exchange()
    local, rank = hosts.local, hosts.rank
    desk = hosts.desks[hosts.local_rank]
    lanes = hosts.max_proxied
    lane = local.slot_bytes // array.itemsize // lanes
    for begin in range(0, max(output.size for output in outputs) or 1, lane):
        here = slice(begin, begin + lane)
        mine = as_bytes(array[here])
        hosts.link.exchange(
            [(hosts.proxy(host, rank), mine) for host in hosts.other_hosts],
            [(owner, as_bytes(outputs[owner][here])) for owner in desk[1:]],
        )
        slots = local.slots(array.dtype, lane * lanes)
        for number, owner in enumerate(desk):
            part = array[here] if owner == rank else outputs[owner][here]
            slots[local.rank][number * lane : number * lane + part.size] = part
        local.step()
        for place, shown in enumerate(hosts.desks):
            if place != hosts.local_rank:
                for number, owner in enumerate(shown):
                    wanted = outputs[owner][here]
                    wanted[:] = slots[place][number * lane : number * lane + wanted.size]
    outputs[rank][:] = array
