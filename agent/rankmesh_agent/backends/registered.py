"""Registered arrays: memory that all ranks of a group have mapped, with an array of each."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.collectives.link import Array, Link
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.shared_memory import Mapping
from rankmesh_agent.transports.windows import Region
from rankmesh_agent.wire.errors import DistNetworkError

_OCTET = np.dtype(np.uint8)
_TEXT = 1024
"""Bytes for a file's name, or for why there is none."""

Outcome = list[Array | DistNetworkError]
"""Takes this rank's array, as bytes; or why no rank has got one, which is no reason to end the group."""


def over_segment(segment: Segment, directory: str, job: str, nbytes: int, outcome: Outcome) -> None:
    """Make an array of ``nbytes`` at every rank, and give memory back of which no rank uses its array any more.

    The first rank makes the memory and says its name, everyone maps it and says how that went, the first removes the
    name: it exists only while all are busy with it.

    Steps: 2.
    """
    windows = segment.windows
    size = Region.bytes_for(segment.size, nbytes)
    mapping: Mapping | None = None
    used = np.array([region.in_use for region in windows.regions.values()], _OCTET)
    offer = why = ""
    try:
        if segment.rank == 0:
            try:
                mapping = Mapping.create(directory, job, size)
                offer = mapping.name
            except DistNetworkError as error:
                why = error.message
        slots = segment.slots(_OCTET, 2 * _TEXT + used.size)
        _write(slots[segment.rank], [offer, why])
        slots[segment.rank][2 * _TEXT :] = used
        segment.step()
        offered, why = _read(slots[0])
        used = np.max([slot[2 * _TEXT :] for slot in slots], axis=0)
        if segment.rank and not why:
            try:
                mapping = Mapping.open(directory, offered, size)
            except DistNetworkError as error:
                why = error.message
        slots = segment.slots(_OCTET, 2 * _TEXT)
        _write(slots[segment.rank], ["", why])
        segment.step()
        failures = [(rank, said) for rank, slot in enumerate(slots) if (said := _read(slot)[1])]
    finally:
        if segment.rank == 0 and mapping is not None:
            mapping.unlink()
    for number, still in zip(list(windows.regions), used.tolist(), strict=True):
        if not still:
            del windows.regions[number]
    if failures or mapping is None:
        rank, said = failures[0]
        outcome.append(DistNetworkError(f"no registered array: {said} (group rank {rank})"))
    else:
        outcome.append(windows.add(mapping).own_array(segment.rank, nbytes))


def over_link(link: Link, directory: str, job: str, nbytes: int, outcome: Outcome) -> None:
    """Make ordinary arrays: there is nothing to save where ranks share no memory.

    Steps: 1.
    """
    link.all_exchange()
    outcome.append(np.empty(nbytes, np.uint8))


def _write(slot: Array, texts: list[str]) -> None:
    for place, text in enumerate(texts):
        raw = text.encode()[:_TEXT]
        slot[place * _TEXT : (place + 1) * _TEXT] = np.frombuffer(raw.ljust(_TEXT, b"\0"), np.uint8)


def _read(slot: Array) -> list[str]:
    return [
        slot[place * _TEXT : (place + 1) * _TEXT].tobytes().rstrip(b"\0").decode(errors="replace") for place in range(2)
    ]
