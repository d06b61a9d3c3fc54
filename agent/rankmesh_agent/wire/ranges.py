"""Numbers of ranks and nodes in texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

FEW = 16
"""Numbers that a text lists one by one."""
_MAX_NUMBERS = 1 << 20


def named_ranks(numbers: Sequence[int]) -> str:
    """Return ranks as text: ``rank 1``, or ``ranks 1, 2``; many as ranges."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shortened(numbers)}"


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return numbers as ranges: ``["0-3", "7"]``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def shortened(numbers: Sequence[int]) -> str:
    """Return ranks as text, ``0, 2, 3``; many as ranges, ``0, 2-40``."""
    return ", ".join(map(str, numbers) if len(numbers) <= FEW else ranges(numbers))


def numbers_in(text: str) -> list[int]:
    """Return the numbers of ranges that are separated by commas, in order.

    Raises:
        ValueError: the text has no such ranges, or too many numbers.
    """
    found: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if len(found) + len(numbers) > _MAX_NUMBERS:
            raise ValueError(f"more than {_MAX_NUMBERS} ranks")
        found += numbers
    return found
