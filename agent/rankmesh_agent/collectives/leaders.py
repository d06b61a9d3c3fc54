"""Short calls over several hosts: the first rank of each host, its leader, speaks for all ranks there.

The ranks of a host pass their payloads to the leader in shared memory, where they compare their calls; the leaders
exchange messages in rounds and share the response on their hosts in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rankmesh_agent.collectives import all_gather as all_gather_link
from rankmesh_agent.collectives import broadcast as broadcast_link
from rankmesh_agent.collectives.hosts import HierarchicalLink
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, partial_dtype
from rankmesh_agent.collectives.rounds import allreduce_partials
from rankmesh_agent.wire.ops import ReduceOp

_OCTET = np.dtype(np.uint8)


def barrier(topology: HierarchicalLink) -> None:
    """Arrive by way of the leaders.

    Steps: 2, and log2 hosts. Each leader sends and receives a header in each of those.
    """

    def arrive(_: Sequence[Array], response: Array) -> None:
        topology.leader_link.arrive()

    _by_leader(topology, None, 0, 0, arrive)


def all_reduce(topology: HierarchicalLink, array: Array, op: ReduceOp) -> None:
    """Reduce on each host in rank order, and between the leaders by recursive doubling.

    Steps: 2, and log2 hosts, 2 more if the number of hosts is no power of two. Each leader sends and receives its bytes
    in each of those, in the precision of a partial result. At most a slot.
    """
    array[:] = _reduced(topology, array, op)


def reduce(topology: HierarchicalLink, array: Array, op: ReduceOp, root: int) -> None:
    """An all_reduce whose result only the root keeps.

    Steps: those of all_reduce, and its bytes.
    """
    result = _reduced(topology, array, op)
    if topology.rank == root:
        array[:] = result


def reduce_scatter(topology: HierarchicalLink, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """An all_reduce of all inputs, of which each rank keeps its own.

    Steps: those of all_reduce, and its bytes for all inputs together. At most a slot from all ranks.
    """
    whole = _reduced(topology, np.concatenate(inputs), op)
    begin = sum(part.size for part in inputs[: topology.rank])
    output[:] = whole[begin : begin + output.size]


def broadcast(topology: HierarchicalLink, array: Array, root: int) -> None:
    """The leader of the root's host sends the array to the other leaders over a tree.

    Steps: 2, and log2 hosts. The leader of the root's host sends the array's bytes in each of those. At most a slot.
    """
    root_host = topology.host_of(root)

    def spread(slots: Sequence[Array], response: Array) -> None:
        if topology.host == root_host:
            response[:] = slots[topology.local_ranks.index(root)]
        broadcast_link.tree_link(topology.leader_link, response, root_host)

    own = array.view(_OCTET) if topology.rank == root else None
    response = _by_leader(topology, own, array.nbytes, array.nbytes, spread)
    if topology.rank != root:
        array[:] = response.view(array.dtype)


def all_gather(topology: HierarchicalLink, outputs: Sequence[Array], array: Array) -> None:
    """The leaders exchange the arrays of their hosts by Bruck's algorithm.

    Steps: 2, and log2 hosts. Each leader sends the bytes of all ranks but its host's in total. At most a slot from all
    ranks.
    """
    lengths = [sum(outputs[rank].nbytes for rank in ranks) for ranks in topology.layout]
    ends = np.cumsum(lengths)

    def exchange(slots: Sequence[Array], response: Array) -> None:
        blocks = [response[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        own = [slot[: outputs[rank].nbytes] for rank, slot in zip(topology.local_ranks, slots, strict=True)]
        all_gather_link.bruck_link(topology.leader_link, blocks, np.concatenate(own))

    longest = max(output.nbytes for output in outputs)
    response, begin = _by_leader(topology, array.view(_OCTET), longest, int(ends[-1]), exchange), 0
    for rank in (rank for ranks in topology.layout for rank in ranks):
        output = outputs[rank]
        output[:] = np.frombuffer(response, _OCTET, output.nbytes, begin).view(output.dtype)
        begin += output.nbytes


def _reduced(topology: HierarchicalLink, array: Array, op: ReduceOp) -> Array:
    """Return the reduction of an array over all ranks, valid until the next step on this host."""

    def reduce_here(slots: Sequence[Array], response: Array) -> None:
        total = np.empty(array.size, partial_dtype(op, array.dtype, topology.size))
        combine_to_partial(op, [slot.view(array.dtype) for slot in slots], total)
        total = allreduce_partials(topology.leader_link, total, op)
        combine_partials(op, [total], topology.size, response.view(array.dtype))

    return _by_leader(topology, array.view(_OCTET), array.nbytes, array.nbytes, reduce_here).view(array.dtype)


def _by_leader(
    topology: HierarchicalLink,
    payload: Array | None,
    most: int,
    nbytes: int,
    exchange: Callable[[Sequence[Array], Array], None],  # the payloads of this host's ranks, memory for the response
) -> Array:
    """Pass payloads of at most ``most`` bytes to this host's leader; return its response, valid until the next step."""
    local = topology.local
    slots = local.slots(_OCTET, most)
    if payload is not None:
        slots[local.rank][: payload.size] = payload
    local.step()
    response = local.slots(_OCTET, nbytes)[0]
    if local.rank == 0:
        exchange(slots, response)
    local.step()
    return response
