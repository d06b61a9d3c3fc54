"""reduce_scatter over several hosts with several ranks each."""

from __future__ import annotations

from collections.abc import Sequence

from rankmesh_agent.collectives.hierarchical.topology import HierarchicalLink
from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, partial_dtype
from rankmesh_agent.wire.ops import ReduceOp


def over_hosts(topology: HierarchicalLink, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Reduce inside each host the arrays for each rank, and send the partial results to that rank, which reduces them.

    The order of the reduction is that of all_reduce.

    Steps: 1 and 1 exchange a chunk of the longest output, at least 1. Each host sends the bytes of the other hosts'
    outputs once, and receives those of its own once from each of the other hosts.
    """
    topology.link.arrive()
    local, rank, own_host = topology.local, topology.rank, topology.host
    proxied = topology.proxied[topology.local_rank]
    lane = local.slot_bytes // output.itemsize // topology.size
    dtype = partial_dtype(op, output.dtype, topology.size)
    scratch = topology.local.scratch(dtype, (len(proxied) + len(topology.layout)) * lane).reshape(-1, lane)
    for begin in range(0, max(part.size for part in inputs) or 1, lane):
        slots = local.slots(output.dtype, lane * topology.size)
        for owner, part in enumerate(inputs):
            piece = part[begin : begin + lane]
            slots[local.rank][owner * lane : owner * lane + piece.size] = piece
        local.step()
        wanted = output[begin : begin + lane]
        totals = {}
        for number, owner in enumerate(proxied):
            own = slice(owner * lane, owner * lane + inputs[owner][begin : begin + lane].size)
            totals[owner] = scratch[number, : own.stop - own.start]
            combine_to_partial(op, [slot[own] for slot in slots], totals[owner])
        partials = [scratch[len(proxied) + host, : wanted.size] for host in range(len(topology.layout))]
        partials[own_host] = totals.pop(rank)
        topology.link.exchange(
            [(owner, as_bytes(total)) for owner, total in totals.items()],
            [(topology.proxy(host, rank), as_bytes(partials[host])) for host in topology.other_hosts],
        )
        combine_partials(op, partials, topology.size, wanted)
