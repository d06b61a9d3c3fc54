"""all_reduce over several hosts with several ranks each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankmesh_agent.collectives.hierarchical.hosts import HierarchicalLink
from rankmesh_agent.collectives.link import Array, as_bytes, chunks, shards
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, partial_dtype
from rankmesh_agent.wire.ops import ReduceOp


def over_hosts(hosts: HierarchicalLink, array: Array, op: ReduceOp) -> None:
    """Reduce inside each host, reduce-scatter and all-gather between the hosts, copy inside each host.

    The ranks of a host are reduced in rank order, then the hosts in the order of their first ranks: floating-point
    sums are associated by host, so they may differ from another transport's in their last bits. They are the same on
    all ranks. Types narrower than float32 stay wide between the hosts until all are in, and are rounded once.

    Steps: 2 and 2 exchanges a chunk. Each host sends and receives 2 (hosts - 1) / hosts of the array's bytes, its
    carriers equal parts of them; what is accumulated in a wider type counts in that the first time.
    """
    everywhere = range(len(hosts.layout))
    hosts.link.all_exchange()
    for where, values in reduced(hosts, array, op, by=everywhere, to=everywhere):
        array[where] = values


def reduced(
    hosts: HierarchicalLink, array: Array, op: ReduceOp, *, by: Sequence[int], to: Sequence[int]
) -> Iterator[tuple[slice, Array]]:
    """Reduce chunk by chunk, after the arrival; on the hosts numbered ``to`` yield where, and what is the result there.

    All write, each carrier reduces its share of the chunk, over its host and then, in its column, over all hosts; the
    result is where its part of the chunk was, which nobody else reads.

    Args:
        by: the hosts that reduce the partial results of all hosts, each an equal part.
        to: the hosts that get the result.
    """
    local = hosts.local
    for chunk in chunks(array.size, local.slot_bytes // array.itemsize):
        part = array[chunk]
        slots = local.slots(array.dtype, part.size)
        slots[local.rank][:] = part
        local.step()
        split = shards(part.size, hosts.leaders)
        if hosts.rail:
            mine = split[hosts.local_rank]
            _reduce_column(hosts, [slot[mine] for slot in slots], slots[local.rank][mine], op, by, to)
        local.step()
        if hosts.host in to:
            for owner, share in enumerate(split):
                yield slice(chunk.start + share.start, chunk.start + share.stop), slots[owner][share]


def _reduce_column(
    hosts: HierarchicalLink, parts: Sequence[Array], result: Array, op: ReduceOp, by: Sequence[int], to: Sequence[int]
) -> None:
    """Reduce this host's ``parts``, exchange what that makes with the column, reduce it and exchange the results."""
    column, home, others = hosts.rail, hosts.host, hosts.other_hosts
    dtype = partial_dtype(op, result.dtype, hosts.size)
    most = -(-result.size // len(by))
    scratch = hosts.local.scratch(dtype, result.size + len(others) * most)
    total = scratch[: result.size]
    combine_to_partial(op, parts, total)
    totals, results = _split(total, by, len(column)), _split(result, by, len(column))
    partials = [scratch[result.size + n * most :][: totals[home].size] for n in range(len(others))]
    hosts.link.exchange(
        [(column[host], as_bytes(totals[host])) for host in others],
        [(column[host], as_bytes(partial)) for host, partial in zip(others, partials, strict=True)],
    )
    combine_partials(op, [*partials[:home], totals[home], *partials[home:]], hosts.size, results[home])
    hosts.link.exchange(
        [(column[host], as_bytes(results[home])) for host in to if host != home],
        [(column[host], as_bytes(results[host])) for host in others if home in to],
    )


def _split(share: Array, by: Sequence[int], hosts: int) -> list[Array]:
    """Return the part of a share that each host reduces; an empty one for those that reduce nothing."""
    parts = [share[:0]] * hosts
    for host, piece in zip(by, shards(share.size, len(by)), strict=True):
        parts[host] = share[piece]
    return parts
