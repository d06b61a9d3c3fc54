"""Registered arrays: memory that all ranks of a group have mapped, with one array of each rank."""

from __future__ import annotations

from struct import Struct

import numpy as np

from rankmesh_agent.collectives.link import Array, Link
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.shared_memory.segment import Region, Segment
from rankmesh_agent.wire.errors import DistNetworkError

_OCTET = np.dtype(np.uint8)
_OFFER = Struct("1024s1024s")
"""A file's name, and the reason why there is none."""

Outcome = list[Array | DistNetworkError]
"""Takes this rank's array, as bytes; or the error of all ranks, which does not end the group."""


def over_segment(segment: Segment, directory: str, job: str, nbytes: int, outcome: Outcome) -> None:
    """Make an array of ``nbytes`` at every rank, and release regions of which no rank uses its array any more.

    The first rank creates the memory and publishes its name, all ranks map it and publish whether they could.

    Steps: 2.
    """
    size = Region.bytes_for(segment.size, nbytes)
    mapping: Mapping | None = None
    used = np.array([region.in_use for region in segment.regions.values()], _OCTET)
    name = why = ""
    try:
        if segment.rank == 0:
            try:
                mapping = Mapping.create(directory, job, size)
                name = mapping.name
            except DistNetworkError as error:
                why = error.message
        slots = segment.slots(_OCTET, _OFFER.size + used.size)
        _OFFER.pack_into(slots[segment.rank].data, 0, name.encode(), why.encode())
        slots[segment.rank][_OFFER.size :] = used
        segment.step()
        name, trouble = _read(slots[0])
        used = np.max([slot[_OFFER.size :] for slot in slots], axis=0)
        if mapping is None and not trouble:
            try:
                mapping = Mapping.open(directory, name, size)
            except DistNetworkError as error:
                trouble = error.message
        slots = segment.slots(_OCTET, _OFFER.size)
        _OFFER.pack_into(slots[segment.rank].data, 0, b"", trouble.encode())
        segment.step()
        failures = [(rank, reason) for rank, slot in enumerate(slots) if (reason := _read(slot)[1])]
    finally:
        if segment.rank == 0 and mapping is not None:
            mapping.release()
    for number, still in zip(list(segment.regions), used.tolist(), strict=True):
        if not still:
            del segment.regions[number]
    if failures or mapping is None:
        rank, reason = failures[0]
        outcome.append(DistNetworkError(f"no registered array: {reason} (group rank {rank})"))
    else:
        outcome.append(segment.add_region(mapping).own_array(segment.rank, nbytes))


def over_link(link: Link, directory: str, job: str, nbytes: int, outcome: Outcome) -> None:
    """Make an ordinary array: ranks without shared memory have nothing to register.

    Steps: 1.
    """
    link.arrive()
    outcome.append(np.empty(nbytes, np.uint8))


def _read(slot: Array) -> list[str]:
    return [text.rstrip(b"\0").decode(errors="replace") for text in _OFFER.unpack_from(slot.data)]
