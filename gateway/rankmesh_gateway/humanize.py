"""Numbers and texts in human-readable form."""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh_agent.wire.ranges import ranges


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
