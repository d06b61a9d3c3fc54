"""Numbers of ranks and nodes as ranges, for texts."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return numbers as ranges: ``["0-3", "7"]``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
