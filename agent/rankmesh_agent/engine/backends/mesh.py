"""The CPU data plane: shared memory where all members see the same, messages elsewhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from rankmesh_agent.collectives.reduction import quiet
from rankmesh_agent.collectives.select import Algorithm, Medium, algorithm
from rankmesh_agent.engine import registered
from rankmesh_agent.engine.backends.base import Backend, Watch
from rankmesh_agent.engine.rounds import MessageLink
from rankmesh_agent.transports.segment import DisagreementError, Segment
from rankmesh_agent.transports.shared import Mapping
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistNetworkError
from rankmesh_agent.wire.ops import Call, Kind

_log = logging.getLogger("rankmesh")
_NOTE = 4096
"""Characters of a rank's note that the others are told."""


class MeshBackend(Backend):
    """Runs calls over a Segment, or over a Link.

    Args:
        link: messages among the members.
        ranks: global ranks of the members, by group rank.
        segment: their shared memory, None if they have none.
    """

    name: ClassVar[str] = "mesh"

    def __init__(self, link: MessageLink, ranks: Sequence[int], segment: Segment | None) -> None:
        self._link = link
        self._ranks = ranks
        self._segment = segment
        self._quiet = quiet()
        self.medium = "self" if len(ranks) == 1 else "shm" if segment is not None else "tcp"

    def algorithm(self, call: Call) -> Algorithm:
        segment, size = self._segment, self._link.size
        if call.kind is Kind.EMPTY:
            return registered.over_link if segment is None else registered.over_segment
        if segment is None:
            return algorithm(call.kind, "link", call.nbytes, size)
        windows = segment.windows
        medium: Medium = "registered" if windows.regions else "reads" if windows.reads else "segment"
        return algorithm(call.kind, medium, call.nbytes, size, segment.slot_bytes)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: Watch) -> None:
        segment = self._segment
        try:
            if segment is not None:
                segment.begin(watch.seq, watch.call.fingerprint, watch.check)
                self._quiet.run(algorithm, segment, *arguments)
            else:
                self._link.begin(watch.seq, watch.call.fingerprint, watch.wait)
                self._quiet.run(algorithm, self._link, *arguments)
        except DisagreementError:
            self._disagree(watch)
        except BaseException:
            if segment is not None:
                segment.leave()
            raise

    def close(self) -> None:
        self._segment = None

    def _disagree(self, watch: Watch) -> NoReturn:
        """Ask everyone what they called, over messages in any case, and say it."""
        call = watch.call
        mine = json.dumps([str(call), watch.note()[:_NOTE]]).encode()
        self._link.begin(watch.seq, 0, watch.wait)
        said = [json.loads(bytes(payload)) for payload in self._link.retell(mine)]
        table = "; ".join(
            f"rank {rank}: {words}{f' ({note})' if note else ''}"
            for rank, (words, note) in zip(watch.numbers, said, strict=True)
        )
        raise CollectiveMismatchError(
            f"the ranks did not make the same call as #{watch.seq} of the group: {table}. No array was changed; find "
            "the rank that took another branch, or whose array has another shape or dtype",
            ranks=[rank for rank, (words, _) in zip(watch.numbers, said, strict=True) if words != str(call)],
            op=call.name,
            seq=watch.seq,
        )


def share_memory(
    link: MessageLink, *, share: bool, directory: str, job: str, slot_bytes: int, crowded: bool, strict: bool
) -> Segment | None:
    """Make the group's shared memory, or find out together that there is none: three rounds of messages.

    Everyone arrives, the first member makes it and says its name, everyone maps it and says how that went, the first
    unlinks it: its name exists only while all are there and busy with it.

    Args:
        link: messages among the members; a call has begun on it.
        share: whether this member may share memory with all others.
        directory: where to make it.
        job: part of the file's name.
        slot_bytes: bytes of a slot.
        crowded: see Segment.
        strict: raise instead of returning None.

    Raises:
        DistNetworkError: ``strict``, and a member could not map the memory; names it.
        DisagreementError: the ranks did not make the same call.
    """
    link.enter()
    slot_bytes = max(slot_bytes, Segment.least_slot_bytes(link.size))
    size = Segment.size_of(link.size, slot_bytes)
    mapping: Mapping | None = None
    offer: dict[str, Any] = {"why": "" if share else "the members are not all on one host"}
    if share and link.rank == 0:
        try:
            mapping = Mapping.create(directory, job, size)
            offer["name"] = mapping.name
        except DistNetworkError as error:
            offer["why"] = error.message
    try:
        offered = json.loads(bytes(link.enter(json.dumps(offer).encode() if link.rank == 0 else b"")[0]))
        why = offered["why"] or offer["why"]
        if not why and link.rank != 0:
            try:
                mapping = Mapping.open(directory, offered["name"], size)
            except DistNetworkError as error:
                why = error.message
        verdicts = [bytes(verdict).decode() for verdict in link.enter(why.encode())]
    finally:
        if link.rank == 0 and mapping is not None:
            mapping.unlink()
    failed = [(rank, verdict) for rank, verdict in enumerate(verdicts) if verdict]
    if not failed and mapping is not None:
        return Segment(mapping, link.rank, link.size, slot_bytes, crowded)
    if strict:
        raise DistNetworkError(f"RANKMESH_TRANSPORT=shm, but group rank {failed[0][0]} cannot: {failed[0][1]}")
    if share and link.rank == 0:
        _log.warning("collectives go over TCP, not shared memory: %s (group rank %d)", failed[0][1], failed[0][0])
    return None
