"""all_reduce over several hosts with several ranks each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankmesh_agent.collectives.hierarchical.hosts import Hosts
from rankmesh_agent.collectives.link import Array, octets, pieces, shares
from rankmesh_agent.collectives.reduction import combine_partials, combine_some, partial_dtype
from rankmesh_agent.wire.ops import ReduceOp


def over_hosts(hosts: Hosts, array: Array, op: ReduceOp) -> None:
    """Reduce inside each host, reduce-scatter and all-gather between the hosts, copy inside each host.

    The ranks of a host are reduced in rank order, then the hosts in the order of their first ranks: floating-point
    sums are associated by host, so they may differ from another transport's in their last bits. They are the same on
    all ranks. Types narrower than float32 stay wide between the hosts until all are in, and are rounded once.

    Steps: 1 and 1 exchange a chunk, and 2 more. Each host sends and receives 2 (hosts - 1) / hosts of the array's
    bytes, its carriers equal parts of them; what is accumulated in a wider type counts in that the first time.
    """
    hosts.enter()
    everywhere = range(len(hosts.layout))
    for where, values in reduced(hosts, array, op, by=everywhere, to=everywhere):
        array[where] = values


def reduced(
    hosts: Hosts, array: Array, op: ReduceOp, *, by: Sequence[int], to: Sequence[int]
) -> Iterator[tuple[slice, Array]]:
    """Reduce chunk by chunk, after the arrival; on the hosts numbered ``to`` yield where, and what is the result there.

    The hosts numbered ``by`` reduce the partial results of all hosts, each an equal part.

    A chunk is under way for three rounds: in the first, all write it into their slots and the carriers reduce their
    shares of it; the second reduces the hosts' partial results; in the third everyone reads the result. Each round
    is one step and one exchange, for all chunks under way together, so that neither waits for the other.

    What is yielded is gone in the next round; ``array`` may be overwritten where it is.
    """
    local, column, host = hosts.local, hosts.column, hosts.host
    wanted = host in to
    others = hosts.elsewhere
    share = local.slot_bytes // array.itemsize // (hosts.carriers + 1)  # behind a chunk, the result of one share of it
    room = share * hosts.carriers
    chunks = pieces(array.size, room)
    dtype = partial_dtype(op, array.dtype, hosts.size)
    scratch = hosts.scratch(dtype, share + len(others) * -(-share // len(by)) if column else 0)
    partials: list[Array] = []
    slots = local.slots(array.dtype, room + share)
    for turn in range(len(chunks) + 2):
        if turn < len(chunks):
            part = array[chunks[turn]]
            slots[local.rank][: part.size] = part
        local.step()
        if turn >= 2 and wanted:
            done = chunks[turn - 2]
            for owner, piece in enumerate(shares(done.stop - done.start, hosts.carriers)):
                where = slice(done.start + piece.start, done.start + piece.stop)
                yield where, slots[owner][room : room + piece.stop - piece.start]
        if turn > len(chunks):
            break
        # All have posted this step, so nobody reads the slots of the one before any more.
        behind, slots = slots, local.slots(array.dtype, room + share)
        if not column:
            continue
        sends, receives = [], []
        if turn:
            former = chunks[turn - 1]
            mine = shares(former.stop - former.start, hosts.carriers)[hosts.place]
            result = slots[local.rank][room:]
            split = _split(result[: mine.stop - mine.start], by, len(column))
            combine_partials(op, partials, hosts.size, split[host])
            sends += [(column[other], octets(split[host])) for other in to if other != host]
            receives += [(column[other], octets(split[other])) for other in others if wanted]
        if turn < len(chunks):
            mine = shares(part.size, hosts.carriers)[hosts.place]
            total = scratch[: mine.stop - mine.start]
            combine_some(op, [slot[mine] for slot in behind], total)
            split = _split(total, by, len(column))
            rest = scratch[share : share + len(others) * split[host].size].reshape(len(others), -1)
            partials = [*rest[:host], split[host], *rest[host:]]
            sends += [(column[other], octets(split[other])) for other in others]
            receives += [(column[other], octets(partials[other])) for other in others]
        hosts.exchange(sends, receives)


def _split(share: Array, by: Sequence[int], hosts: int) -> list[Array]:
    """Return the part of a share that each host reduces; an empty one for those that reduce nothing."""
    parts = [share[:0]] * hosts
    for host, piece in zip(by, shares(share.size, len(by)), strict=True):
        parts[host] = share[piece]
    return parts
