"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a reader of names, separated by commas."""
    all_names = list(known)

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in all_names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(all_names)}")
        return names

    return read


def numbers(text: str) -> list[int]:
    """Read whole numbers above 0, separated by commas."""
    try:
        read = [int(number) for number in text.split(",")]
    except ValueError:
        read = [0]
    if min(read) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers above 0 are wanted, separated by commas")
    return read


def number(text: str) -> int:
    """Read a whole number above 0."""
    (read, *more) = numbers(text)
    if more:
        raise argparse.ArgumentTypeError(f"{text!r}: one number is wanted")
    return read


def progress(line: str) -> None:
    """Say how far we are, where it does not mix with what is printed."""
    print(f"[benchmarks] {line}", file=sys.stderr, flush=True)
