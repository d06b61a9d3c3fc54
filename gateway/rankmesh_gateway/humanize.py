"""Numbers in human-readable form, and the sentences that problems and events share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rankmesh_agent.wire.ranges import ranges

if TYPE_CHECKING:
    from rankmesh_gateway.schemas import GroupInFlight


def size(nbytes: float) -> str:
    """Return a number of bytes with a unit: ``512 B``, ``1.5 MB``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}" if nbytes < 999.5 * factor else f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes:.0f} B"


def rate(nbytes: float) -> str:
    """Return bytes a second with a unit."""
    return f"{size(nbytes)}/s"


def seconds(value: float) -> str:
    """Return a time span with a unit: ``35 µs``, ``1.2 ms``, ``3.4 s``, ``5 min``, ``2.5 h``."""
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def ranks(numbers: Iterable[int]) -> str:
    """Return ranks as ranges: ``0-3, 7``."""
    return ", ".join(ranges(numbers))


def suspect_text(subject: str, silence: float) -> str:
    """Return the sentence on a suspect rank or agent."""
    return f"{subject} is suspect: no heartbeat for {seconds(silence)}"


def failed_text(subject: str, reason: str) -> str:
    """Return the sentence on a rank, an agent or a group that has failed."""
    return f"{subject} has failed: {reason}"


def slow_text(subject: str, share: float, age: float, does: str) -> str:
    """Return the sentence on a rank that makes the others wait, and on what it does, if that is known."""
    text = f"{subject} makes the others wait {share:.0%} of the time, since {seconds(age)} ago"
    return f"{text}; it {does}" if does else text


def held_up_text(call: GroupInFlight, subject: str, known: Mapping[int, str]) -> str:
    """Return the sentence on a call that waits for missing ranks; ``known`` describes ranks."""
    missing = call.missing
    one = len(missing) == 1
    culprit = f"rank {missing[0]}{known.get(missing[0], '')}" if one else f"{len(missing)} ranks, {ranks(missing)}"
    return f"{call.op} #{call.seq} in {subject} has been held up for {seconds(call.age)} by {culprit}"
