"""How the members of a group come to share memory, those of each host, or find out together that they cannot."""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

from rankmesh_agent.collectives.hierarchical.hosts import Layout
from rankmesh_agent.engine.rounds import MessageLink
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.shared import Mapping
from rankmesh_agent.wire.errors import DistNetworkError

_log = logging.getLogger("rankmesh")


class Sharing(NamedTuple):
    """How this process would share memory.

    Attributes:
        allowed: whether it may at all.
        directory: where it is made.
        job: part of the file's name.
        slot_bytes: bytes of a slot; the least of all members' counts.
        crowded: see Segment.
        strict: it is an error if not all members can share one memory.
    """

    allowed: bool
    directory: str
    job: str
    slot_bytes: int
    crowded: bool
    strict: bool


def share_memory(link: MessageLink, layout: Layout, sharing: Sharing) -> Segment | None:
    """Make the memory that the members of this host share: three rounds of messages among all members.

    Everyone arrives and says how long its slots would be, the first member of each host makes its host's memory and
    says its name, everyone maps it and says how that went, the first unlinks it: its name exists only while all are
    there and busy with it. All hosts have theirs, or none has: members must not choose different algorithms.

    Args:
        link: messages among the members; a call has begun on it.
        layout: which members are on which host.
        sharing: how.

    Returns:
        This host's memory, of this rank alone where the host has no other member; None if it is not to be had on
        some host, or no host has two members.

    Raises:
        DistNetworkError: ``strict``, and a member cannot map the memory or is on another host; names it.
        DisagreementError: the ranks did not make the same call.
    """
    # Chunks are as long as slots allow, so all members, on all hosts, need the same ones.
    wishes = link.enter(b"%d" % sharing.slot_bytes)
    slot_bytes = max(min(map(int, map(bytes, wishes))), Segment.least_slot_bytes(link.size))
    here = next(ranks for ranks in layout if link.rank in ranks)
    size = Segment.size_of(len(here), slot_bytes)
    why = _reason_not_to(layout, sharing)
    mapping: Mapping | None = None
    name = ""
    if not why:
        try:
            if len(here) == 1:
                mapping = Mapping.private(size)
            elif link.rank == here[0]:
                mapping = Mapping.create(sharing.directory, sharing.job, size)
                name = mapping.name
        except DistNetworkError as error:
            why = error.message
    try:
        offers = link.enter(json.dumps([name, why]).encode())
        offered, refused = json.loads(bytes(offers[here[0]]))
        why = why or refused
        if not why and mapping is None:
            try:
                mapping = Mapping.open(sharing.directory, offered, size)
            except DistNetworkError as error:
                why = error.message
        verdicts = [bytes(verdict).decode() for verdict in link.enter(why.encode())]
    finally:
        if name and mapping is not None:
            mapping.unlink()
    failed = [(rank, verdict) for rank, verdict in enumerate(verdicts) if verdict]
    if not failed and mapping is not None:
        return Segment(mapping, here.index(link.rank), len(here), slot_bytes, sharing.crowded)
    if sharing.strict:
        raise DistNetworkError(f"RANKMESH_TRANSPORT=shm, but group rank {failed[0][0]} cannot: {failed[0][1]}")
    if link.rank == 0 and not _reason_not_to(layout, sharing):
        _log.warning("collectives go over TCP, not shared memory: %s (group rank %d)", failed[0][1], failed[0][0])
    return None


def _reason_not_to(layout: Layout, sharing: Sharing) -> str:
    """Return why this member shares no memory, '' if it should."""
    if not sharing.allowed:
        return "it may not share memory"
    if len(layout) > 1 and (sharing.strict or max(map(len, layout)) == 1):
        return "the members are not all on one host"
    return ""
