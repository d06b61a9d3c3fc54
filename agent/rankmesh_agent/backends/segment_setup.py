"""How the members of a group come to share memory, those of each host, or find out together that they cannot."""

from __future__ import annotations

import logging
import struct
from typing import NamedTuple

from rankmesh_agent.collectives.hierarchical.hosts import Layout
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.shared_memory import Mapping
from rankmesh_agent.wire.errors import DistNetworkError

_log = logging.getLogger("rankmesh")

_LONGEST_REASON = 1 << 12
_NOTE = struct.Struct(f"!160s{_LONGEST_REASON}s")
"""What the first member of a host tells the others there: the name of their memory, and why there is none."""


class SegmentOptions(NamedTuple):
    """How this process would share memory.

    Attributes:
        allowed: whether it may at all.
        directory: where it is made.
        job: part of the file's name.
        slot_bytes: bytes of a slot; the least of all members' counts.
        crowded: see Segment.
        strict: it is an error if not all members can share one memory.
        lend: where all members share one memory, another process will use it in this one's place.
    """

    allowed: bool
    directory: str
    job: str
    slot_bytes: int
    crowded: bool
    strict: bool
    delegated: bool = False


def create_segment(link: MessageLink, layout: Layout, sharing: SegmentOptions) -> Segment | None:
    """Make the memory that the members of this host share, or find out together that it is not to be had.

    By way of rank 0, all agree on the length of the slots. Then the first member of each host makes its host's memory
    and tells the others there its name; all map it, and say by way of rank 0 how that went. At last the first unlinks
    it: its name exists only while all are there and busy with it. All hosts have theirs, or none has: members must not
    choose different algorithms. That takes fewer than 5 messages a member, however many there are.

    Args:
        link: messages among the members; a call has begun on it.
        layout: which members are on which host.
        sharing: how.

    Returns:
        This host's memory, of this rank alone where the host has no other member; None if it is not to be had on
        some host, or no host has two members.

    Raises:
        DistNetworkError: ``strict``, and a member cannot map the memory or is on another host; names it.
        CallMismatchError: the ranks did not make the same call.
    """
    # Chunks are as long as slots allow, so all members, on all hosts, need the same ones.
    shortest = link.via_root(b"%d" % sharing.slot_bytes, lambda wishes: min(wishes, key=lambda wish: int(bytes(wish))))
    slot_bytes = max(int(bytes(shortest)), Segment.min_slot_bytes(link.size))
    here = next(ranks for ranks in layout if link.rank in ranks)
    first = here[0]
    size = Segment.bytes_for(len(here), slot_bytes)
    why = _reason_not_to(layout, sharing)
    mapping: Mapping | None = None
    try:
        if link.rank == first and not why:
            try:
                private = len(here) == 1
                mapping = (
                    Mapping.anonymous(size)
                    if private
                    else Mapping.create(sharing.directory, sharing.job, size, keep=sharing.delegated)
                )
            except DistNetworkError as error:
                why = error.message
        note = bytearray(_NOTE.size)
        if link.rank == first:
            said = (b"" if mapping is None else mapping.name.encode()), why.encode()
            _NOTE.pack_into(note, 0, *said)
            link.exchange([(member, memoryview(note)) for member in here[1:]], [])
        else:
            link.exchange([], [(first, memoryview(note))])
            name, refused = (text.rstrip(b"\0").decode(errors="replace") for text in _NOTE.unpack(note))
            why = why or refused
            if not why:
                try:
                    mapping = Mapping.open(sharing.directory, name, size, keep=sharing.delegated)
                except DistNetworkError as error:
                    why = error.message
        verdict = bytes(link.via_root(why.encode()[:_LONGEST_REASON], _first_refusal))
    finally:
        if link.rank == first and mapping is not None:
            mapping.unlink()
    if not verdict and mapping is not None:
        return Segment(mapping, here.index(link.rank), len(here), slot_bytes, sharing.crowded)
    refuser, _, reason = verdict.decode(errors="replace").partition(" ")
    if sharing.strict:
        raise DistNetworkError(f"RANKMESH_TRANSPORT=shm, but group rank {refuser} cannot: {reason}")
    if link.rank == 0 and not _reason_not_to(layout, sharing):
        _log.warning("collectives go over TCP, not shared memory: %s (group rank %s)", reason, refuser)
    return None


def _first_refusal(reasons: list[memoryview | bytes]) -> bytes:
    """Return the first member that cannot share memory, and why; nothing if all can."""
    return next((b"%d " % rank + bytes(reason) for rank, reason in enumerate(reasons) if len(reason)), b"")


def _reason_not_to(layout: Layout, sharing: SegmentOptions) -> str:
    """Return why this member shares no memory, '' if it should."""
    if not sharing.allowed:
        return "it may not share memory"
    if len(layout) > 1 and (sharing.strict or max(map(len, layout)) == 1):
        return "the members are not all on one host"
    return ""
