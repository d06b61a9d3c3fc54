"""Setup of a group's shared memory: one segment on each host, or none on any host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rankmesh_agent.collectives.hosts import Layout
from rankmesh_agent.collectives.rounds import Payload, allreduce_bytes, distances
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.shared_memory.segment import Process, Segment
from rankmesh_agent.wire.errors import DistNetworkError

_log = logging.getLogger("rankmesh")

_MAX_REASON = 1 << 12


class Agreement(NamedTuple):
    """Slots and reads of memory that the ranks of a job on one host have agreed on, for all of its groups.

    Attributes:
        shares_cores: whether a rank shares its core with others.
        processes: see Segment.processes; empty unless all ranks may read each other's memory.
    """

    slot_bytes: int
    shares_cores: bool
    processes: Sequence[Process]


class SegmentOptions(NamedTuple):
    """Parameters by which this process shares memory.

    Attributes:
        slot_bytes: bytes of a slot; the members take the least of theirs.
        strict: raise if not all members can share one segment.
        warn: logs why the members share no memory, with the arguments of Logger.warning.
        agreement: that of all ranks of the job, None as long as there is none.
    """

    allowed: bool
    directory: str
    job: str
    slot_bytes: int
    oversubscribed: bool
    strict: bool
    warn: Callable[..., None] = _log.warning
    agreement: Agreement | None = None


def create_segment(link: MessageLink, layout: Layout, options: SegmentOptions) -> Segment | None:
    """Create the segment that the members of this host share; all hosts have one afterwards, or none has.

    All members agree on the length of the slots, and on whether members share cores, unless the job has. Then the first
    member of each host creates the host's file, and its name follows a tree to the others there; all map it, and agree
    whether they could. Members must not choose different algorithms, so one refusal counts for all. It takes about
    2 log2 size messages each.

    Args:
        link: messages among the members; a call has begun on it.

    Returns:
        This host's segment, of this rank alone where the host has no other member; None if a host cannot have one, or
        no host has two members.

    Raises:
        DistNetworkError: ``strict``, and a member cannot map the segment or is on another host; names its group rank.
        CallMismatchError: the ranks did not make the same call.
    """
    # Chunks are as long as slots allow, so all members, on all hosts, need the same ones.
    agreement = options.agreement
    if agreement is None:
        agreed = allreduce_bytes(link, b"%d %d" % (options.slot_bytes, options.oversubscribed), _agree)
        shortest, shares_cores = map(int, bytes(agreed).split())
        agreement = Agreement(shortest, bool(shares_cores), ())
    link.shares_cores = agreement.shares_cores
    slot_bytes = max(agreement.slot_bytes, Segment.min_slot_bytes(link.size))
    here = next(ranks for ranks in layout if link.rank in ranks)
    first = here[0]
    size = Segment.bytes_for(len(here), slot_bytes)
    why = _refusal(layout, options)
    mapping: Mapping | None = None
    try:
        if link.rank == first and not why:
            try:
                alone = len(here) == 1
                mapping = Mapping.anonymous(size) if alone else Mapping.create(options.directory, options.job, size)
            except DistNetworkError as error:
                why = error.message
        name = "" if mapping is None else mapping.name
        offer = _pass_on(link, here, max(map(len, layout)), f"{name} {why}".encode()[:_MAX_REASON])
        name, _, refused = bytes(offer).decode(errors="replace").partition(" ")
        trouble = why or refused
        if mapping is None and not trouble:
            try:
                mapping = Mapping.open(options.directory, name, size)
            except DistNetworkError as error:
                trouble = error.message
        refusal = b"%d " % link.rank + trouble.encode()[:_MAX_REASON] if trouble else b""
        verdict = bytes(allreduce_bytes(link, refusal, lambda lower, upper: lower or upper))
    finally:
        if link.rank == first and mapping is not None:
            mapping.release()
    if not verdict and mapping is not None:
        segment = Segment(mapping, here.index(link.rank), len(here), slot_bytes, options.oversubscribed)
        if agreement.shares_cores:  # a step takes longer than what the cache saves
            segment.chunk_bytes = slot_bytes
        return segment
    refuser, _, reason = verdict.decode(errors="replace").partition(" ")
    if options.strict:
        raise DistNetworkError(
            f"RANKMESH_TRANSPORT=shm, but group rank {refuser} cannot: {reason}", ranks=[int(refuser)]
        )
    if link.rank == 0 and not _refusal(layout, options):
        options.warn("collectives go over TCP, not shared memory: %s (group rank %s)", reason, refuser)
    return None


def _agree(lower: memoryview | bytes, upper: memoryview | bytes) -> bytes:
    """Return the shorter slots of two groups of members, and whether a member of either shares its core."""
    slots, shares_cores = zip(*(map(int, bytes(each).split()) for each in (lower, upper)), strict=True)
    return b"%d %d" % (min(slots), max(shares_cores))


def _pass_on(link: MessageLink, here: Sequence[int], longest: int, offer: Payload) -> Payload:
    """Send the offer of this host's first member to the others there, along a binomial tree; all hosts step alike."""
    place = here.index(link.rank)
    for distance in distances(longest):
        to = here[place + distance] if place < min(distance, len(here) - distance) else None
        source = here[place - distance] if distance <= place < 2 * distance else None
        received = link.step(to, offer, source)
        if source is not None:
            offer = received
    return offer


def _refusal(layout: Layout, options: SegmentOptions) -> str:
    """Return why this member shares no memory, '' if it does."""
    if not options.allowed:
        return "it may not share memory"
    if len(layout) > 1 and (options.strict or max(map(len, layout)) == 1):
        return "the members are not all on one host"
    return ""
