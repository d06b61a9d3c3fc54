"""Registered arrays: memory that all ranks of a group have mapped, with one array of each rank."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.collectives.link import Array, Link
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.shared_memory import Mapping
from rankmesh_agent.transports.windows import Region
from rankmesh_agent.wire.errors import DistNetworkError

_OCTET = np.dtype(np.uint8)
_TEXT = 1024
"""Bytes of a file's name, or of the reason why there is none."""

Outcome = list[Array | DistNetworkError]
"""Takes this rank's array, as bytes; or the error of all ranks, which does not end the group."""


def over_segment(segment: Segment, directory: str, job: str, nbytes: int, outcome: Outcome) -> None:
    """Make an array of ``nbytes`` at every rank, and release regions of which no rank uses its array any more.

    The first rank creates the memory and publishes its name, all ranks map it and publish whether they could, the first
    unlinks it: the name exists only during the call.

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
        failures = [(rank, reason) for rank, slot in enumerate(slots) if (reason := _read(slot)[1])]
    finally:
        if segment.rank == 0 and mapping is not None:
            mapping.unlink()
    for number, still in zip(list(windows.regions), used.tolist(), strict=True):
        if not still:
            del windows.regions[number]
    if failures or mapping is None:
        rank, reason = failures[0]
        outcome.append(DistNetworkError(f"no registered array: {reason} (group rank {rank})"))
    else:
        outcome.append(windows.add(mapping).own_array(segment.rank, nbytes))


def over_link(link: Link, directory: str, job: str, nbytes: int, outcome: Outcome) -> None:
    """Make an ordinary array: ranks without shared memory have nothing to register.

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
