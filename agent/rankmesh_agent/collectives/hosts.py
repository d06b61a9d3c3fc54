"""Groups on several hosts: shared memory inside a host, messages between hosts; long arrays move along rails.

Every byte crosses between hosts once for each host, not once for each rank. Only collectives that gain from this have
such algorithms: the reductions, and those that copy the same data to many ranks. gather, scatter and all_to_all move
different bytes for every rank, so they use the Link directly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.all_reduce import halving_link
from rankmesh_agent.collectives.broadcast import tree_scatter_link
from rankmesh_agent.collectives.link import FEW_RANKS, Array, Exchange, Link, as_bytes, chunks, shards
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, partial_dtype
from rankmesh_agent.collectives.rounds import distances
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp

Layout = tuple[tuple[int, ...], ...]
"""The group ranks on each host. Hosts come in the order of their first member, the members of a host in rank order."""


def layout_of(hosts: Sequence[Hashable]) -> Layout:
    """Return the layout of a group, given an identity of each rank's host: equal for ranks that can share memory."""
    members: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return tuple(map(tuple, members.values()))


class LeaderLink(Link):
    """The Link among one rank of each host, numbered by host.

    Args:
        leaders: the rank of each host; the other ranks may not use this link.
    """

    def __init__(self, link: Link, leaders: Sequence[int], host: int) -> None:
        self.rank = host
        self.size = len(leaders)
        self._link = link
        self._leaders = leaders

    def arrive(self) -> None:
        for distance in distances(self.size):
            self.step((self.rank + distance) % self.size, b"", (self.rank - distance) % self.size)

    def step(self, to: int | None, payload: memoryview | bytes, source: int | None) -> memoryview | bytes:
        return self._link.step(
            None if to is None else self._leaders[to], payload, None if source is None else self._leaders[source]
        )

    def start(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> Exchange:
        return self._link.start(
            [(self._leaders[host], view) for host, view in sends],
            [(self._leaders[host], view) for host, view in receives],
        )

    def finish(self, exchange: Exchange) -> None:
        self._link.finish(exchange)

    def scratch(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._link.scratch(nbytes)


class HierarchicalLink:
    """Communication of a group on several hosts: its Link, and the shared memory of this rank's host.

    Each host has as many *leaders* as the smallest host has members: its first ones. The leaders with the same local
    rank on their hosts form a *rail*, which carries an equal part of the bytes. Other ranks send no long arrays.

    Args:
        local: shared memory of this host's members, in their order; of this rank alone if it is the only member there.

    Attributes:
        local_rank: position of this rank in ``local_ranks``, and its rank in ``local``.
        leader_link: messages among the first ranks of the hosts.
        rail: ranks of this rank's rail, by host; empty if this rank is not a leader.
        rail_link: messages along this rank's rail; None if this rank is not a leader.
    """

    def __init__(self, link: Link, local: Segment, layout: Layout) -> None:
        self.link = link
        self.rank = link.rank
        self.size = link.size
        self.local = local
        self.layout = layout
        self._hosts = {rank: host for host, ranks in enumerate(layout) for rank in ranks}
        self.host = self._hosts[self.rank]
        self.local_ranks = layout[self.host]
        self.local_rank = self.local_ranks.index(self.rank)
        self.leaders = min(map(len, layout))
        self.leader_link = LeaderLink(link, [ranks[0] for ranks in layout], self.host)
        self.rail = [ranks[self.local_rank] for ranks in layout] if self.local_rank < self.leaders else []
        self.rail_link = LeaderLink(link, self.rail, self.host) if self.rail else None
        self.other_hosts = [host for host in range(len(layout)) if host != self.host]

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self._hosts[rank]

    def served(self, leader: int) -> list[tuple[int, ...]]:
        """Return the ranks on each host whose arrays the leader with a local rank carries, its own among them."""
        return [ranks[leader :: self.leaders] for ranks in self.layout]


# Reductions


def all_reduce(topology: HierarchicalLink, array: Array, op: ReduceOp) -> None:
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
    for where, values in _reduced(topology, array, op, by=everywhere, to=everywhere):
        array[where] = values


def reduce(topology: HierarchicalLink, array: Array, op: ReduceOp, root: int) -> None:
    """Reduce as all_reduce does, at the root's host; of more than two hosts, each reduces a part and sends it there.

    Steps: 1 and 1 exchange a chunk, and 2 more. Of two hosts, the other one sends the array's bytes once. Of more,
    each sends and receives (hosts - 1) / hosts of them, the root's host receives as many again, and the others send
    1 / hosts again: if every host sent its array to the root's host, that would receive (hosts - 1) times the array.
    """
    topology.link.arrive()
    root_host = [topology.host_of(root)]
    by = root_host if len(topology.layout) == 2 else range(len(topology.layout))
    for where, values in _reduced(topology, array, op, by=by, to=root_host):
        if topology.rank == root:
            array[where] = values


def _reduced(
    topology: HierarchicalLink, array: Array, op: ReduceOp, *, by: Sequence[int], to: Sequence[int]
) -> Iterator[tuple[slice, Array]]:
    """Reduce by chunks, in equal parts at the hosts ``by``; at those of ``to``, yield each slice and its values."""
    # Each rank writes its chunk. Each leader reduces its shard of it over its host and then, along its rail, over
    # all hosts. The result overwrites the leader's own part of the chunk, which no other rank reads.
    local, rail, own, others = topology.local, topology.rail, topology.host, topology.other_hosts
    for chunk in chunks(array.size, local.slot_bytes // array.itemsize):
        part = array[chunk]
        slots = local.slots(array.dtype, part.size)
        slots[local.rank][:] = part
        local.step()
        split = shards(part.size, topology.leaders)
        if rail:
            mine = split[topology.local_rank]
            parts, result = [slot[mine] for slot in slots], slots[local.rank][mine]
            if len(rail) > FEW_RANKS:
                _reduce_among_many_hosts(topology, parts, result, op)
            else:
                of_hosts = [slice(0, 0)] * len(rail)
                for host, piece in zip(by, shards(result.size, len(by)), strict=True):
                    of_hosts[host] = piece
                _reduce_by_hosts(topology, parts, result, op, of_hosts)
                topology.link.exchange(
                    [(rail[host], as_bytes(result[of_hosts[own]])) for host in to if host != own],
                    [(rail[host], as_bytes(result[of_hosts[host]])) for host in others if own in to],
                )
        local.step()
        if own in to:
            for owner, share in enumerate(split):
                yield slice(chunk.start + share.start, chunk.start + share.stop), slots[owner][share]


def _reduce_among_many_hosts(topology: HierarchicalLink, parts: Sequence[Array], result: Array, op: ReduceOp) -> None:
    """Reduce this host's parts, and the partial results of all hosts along the rail by recursive halving."""
    assert topology.rail_link is not None
    whole = topology.local.scratch(partial_dtype(op, result.dtype, topology.size), result.size)
    combine_to_partial(op, parts, whole)
    halving_link(topology.rail_link, whole, ReduceOp.SUM if op is ReduceOp.AVG else op)
    combine_partials(op, [whole], topology.size, result)


def _reduce_by_hosts(
    topology: HierarchicalLink, parts: Sequence[Array], result: Array, op: ReduceOp, of_hosts: Sequence[slice]
) -> None:
    """Reduce this host's parts, exchange partial results along the rail, and reduce this host's slice of the result."""
    rail, others = topology.rail, topology.other_hosts
    mine = of_hosts[topology.host]
    width = mine.stop - mine.start
    dtype = partial_dtype(op, result.dtype, topology.size)
    scratch = topology.local.scratch(dtype, result.size + len(others) * width)
    total = scratch[: result.size]
    combine_to_partial(op, parts, total)
    partials = [scratch[result.size + number * width :][:width] for number in range(len(others))]
    topology.link.exchange(
        [(rail[host], as_bytes(total[of_hosts[host]])) for host in others],
        [(rail[host], as_bytes(partial)) for host, partial in zip(others, partials, strict=True)],
    )
    partials.insert(topology.host, total[mine])
    combine_partials(op, partials, topology.size, result[mine])


def reduce_scatter(topology: HierarchicalLink, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Reduce as all_reduce does; each leader sends partial results to the host of their ranks, which reduces them.

    Steps: 2 and 1 exchange a chunk of the longest output, at least 1. Each host sends the bytes of the other hosts'
    outputs once, and receives those of its own once from each of the other hosts.
    """
    topology.link.arrive()
    local = topology.local
    served = [topology.served(leader) for leader in range(topology.leaders)]
    order = [rank for of_leader in served for ranks in of_leader for rank in ranks]
    lane = local.slot_bytes // output.itemsize // topology.size
    for begin in range(0, max(part.size for part in inputs) or 1, lane):
        pieces = {rank: inputs[rank][begin : begin + lane] for rank in order}
        ends = list(accumulate((pieces[rank].size for rank in order), initial=0))
        places = {rank: slice(*ends[number : number + 2]) for number, rank in enumerate(order)}
        slots = local.slots(output.dtype, ends[-1])
        for rank, piece in pieces.items():
            slots[local.rank][places[rank]] = piece
        local.step()
        if topology.rail:
            sizes = [sum(pieces[rank].size for rank in ranks) for ranks in served[topology.local_rank]]
            stops = list(accumulate(sizes, initial=0))
            first = places[topology.rail[0]].start
            shard = slice(first, first + stops[-1])
            _reduce_by_hosts(
                topology,
                [slot[shard] for slot in slots],
                slots[local.rank][shard],
                op,
                [slice(*stops[host : host + 2]) for host in range(len(sizes))],
            )
        local.step()
        output[begin : begin + lane] = slots[topology.local_rank % topology.leaders][places[topology.rank]]


# Copies


def broadcast(topology: HierarchicalLink, array: Array, root: int) -> None:
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
            pieces = zip(topology.other_hosts, shards(share.size, len(topology.other_hosts)), strict=True)
            topology.link.exchange([(topology.rail[host], as_bytes(share[piece])) for host, piece in pieces], [])
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


def all_gather(topology: HierarchicalLink, outputs: Sequence[Array], array: Array) -> None:
    """Each rank writes to shared memory; the leaders exchange the arrays of their hosts' ranks, and all read them.

    Steps: 2 and 1 exchange a chunk of the longest array, at least 1. Each host sends its ranks' bytes once to every
    other host.
    """
    topology.link.arrive()
    local, own = topology.local, topology.host
    served = [topology.served(leader) for leader in range(topology.leaders)]
    received = [list(chain(*ranks[:own], *ranks[own + 1 :])) for ranks in served]
    # A lane for the leader's own array, and one for each that it receives: fewest ranks of its host, most of others.
    lanes = sum(-(-len(ranks) // topology.leaders) for ranks in topology.layout)
    lane = local.slot_bytes // array.itemsize // lanes
    for begin in range(0, max(output.size for output in outputs) or 1, lane):
        parts = [output[begin : begin + lane] for output in outputs]
        slots = local.slots(array.dtype, lane * lanes)
        slots[local.rank][: parts[topology.rank].size] = array[begin : begin + lane]
        local.step()
        held = {rank: slot[: parts[rank].size] for rank, slot in zip(topology.local_ranks, slots, strict=True)}
        for leader, ranks in enumerate(received):
            held |= {rank: slots[leader][lane * number :][: parts[rank].size] for number, rank in enumerate(ranks, 1)}
        if topology.rail:
            mine = served[topology.local_rank]
            topology.link.exchange(
                [(topology.rail[host], as_bytes(held[rank])) for host in topology.other_hosts for rank in mine[own]],
                [(topology.rail[host], as_bytes(held[rank])) for host in topology.other_hosts for rank in mine[host]],
            )
        local.step()
        for rank, part in enumerate(parts):
            part[:] = held[rank]
