"""Numbers of ranks and nodes in texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def named_ranks(numbers: Sequence[int]) -> str:
    """Return ranks as text: ``rank 1``, or ``ranks 1, 2``."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return numbers as ranges: ``["0-3", "7"]``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
