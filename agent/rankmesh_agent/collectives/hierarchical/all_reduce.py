"""all_reduce over several hosts with several ranks each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankmesh_agent.collectives.all_reduce import halving_link
from rankmesh_agent.collectives.hierarchical.topology import HierarchicalLink
from rankmesh_agent.collectives.link import FEW_RANKS, Array, as_bytes, chunks, shards
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, partial_dtype
from rankmesh_agent.wire.ops import ReduceOp


def over_hosts(topology: HierarchicalLink, array: Array, op: ReduceOp) -> None:
    """Reduce inside each host, reduce-scatter and all-gather between the hosts, copy inside each host.

    The algorithm reduces the ranks of a host in rank order, then the hosts in the order of their first ranks. The
    association of floating-point sums depends on the hosts, so the last bits may differ from another transport's; they
    are the same on all ranks. Types narrower than float32 stay wide between the hosts and are rounded once, at the end.

    Steps: 2 and 2 exchanges a chunk; along many hosts, 2 and those of all_reduce.halving_link. Each host sends and
    receives 2 (hosts - 1) / hosts of the array's bytes, its leaders equal parts of them; a dtype with a wider
    accumulator counts in that one the first time, along many hosts both times.
    """
    everywhere = range(len(topology.layout))
    topology.link.arrive()
    for where, values in reduced(topology, array, op, by=everywhere, to=everywhere):
        array[where] = values


def reduced(
    topology: HierarchicalLink, array: Array, op: ReduceOp, *, by: Sequence[int], to: Sequence[int]
) -> Iterator[tuple[slice, Array]]:
    """Reduce chunk by chunk, after the arrival; on the hosts ``to``, yield each slice of the result and its values.

    Each rank writes its chunk. Each leader reduces its shard of the chunk over its host and then, along its rail, over
    all hosts. The result overwrites the leader's own part of the chunk, which no other rank reads.

    Args:
        by: numbers of the hosts that reduce the partial results of all hosts, each an equal part.
        to: numbers of the hosts that receive the result.
    """
    local = topology.local
    for chunk in chunks(array.size, local.slot_bytes // array.itemsize):
        part = array[chunk]
        slots = local.slots(array.dtype, part.size)
        slots[local.rank][:] = part
        local.step()
        split = shards(part.size, topology.leaders)
        if topology.rail:
            mine = split[topology.local_rank]
            _reduce_rail(topology, [slot[mine] for slot in slots], slots[local.rank][mine], op, by, to)
        local.step()
        if topology.host in to:
            for owner, share in enumerate(split):
                yield slice(chunk.start + share.start, chunk.start + share.stop), slots[owner][share]


def _reduce_rail(
    topology: HierarchicalLink,
    parts: Sequence[Array],
    result: Array,
    op: ReduceOp,
    by: Sequence[int],
    to: Sequence[int],
) -> None:
    """Reduce this host's ``parts``, exchange partial results along the rail, reduce them and exchange the results."""
    rail, own, others = topology.rail, topology.host, topology.other_hosts
    dtype = partial_dtype(op, result.dtype, topology.size)
    if len(rail) > FEW_RANKS:
        assert topology.rail_link is not None
        whole = topology.local.scratch(dtype, result.size)
        combine_to_partial(op, parts, whole)
        halving_link(topology.rail_link, whole, ReduceOp.SUM if op is ReduceOp.AVG else op)
        combine_partials(op, [whole], topology.size, result)
        return
    max_part = -(-result.size // len(by))
    scratch = topology.local.scratch(dtype, result.size + len(others) * max_part)
    total = scratch[: result.size]
    combine_to_partial(op, parts, total)
    totals, results = _split_among(total, by, len(rail)), _split_among(result, by, len(rail))
    partials = [scratch[result.size + n * max_part :][: totals[own].size] for n in range(len(others))]
    topology.link.exchange(
        [(rail[host], as_bytes(totals[host])) for host in others],
        [(rail[host], as_bytes(partial)) for host, partial in zip(others, partials, strict=True)],
    )
    combine_partials(op, [*partials[:own], totals[own], *partials[own:]], topology.size, results[own])
    topology.link.exchange(
        [(rail[host], as_bytes(results[own])) for host in to if host != own],
        [(rail[host], as_bytes(results[host])) for host in others if own in to],
    )


def _split_among(share: Array, by: Sequence[int], host_count: int) -> list[Array]:
    """Return the part of a shard that each host reduces; an empty one for hosts that reduce nothing."""
    parts = [share[:0]] * host_count
    for host, piece in zip(by, shards(share.size, len(by)), strict=True):
        parts[host] = share[piece]
    return parts
