"""Runs of processes that several tests look at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from support.processes import Ranks

Reports = list[dict[str, Any]]
"""What ranks reported, by rank."""


def once(paths: pytest.TempPathFactory, start: Callable[..., Reports]) -> Callable[..., Reports]:
    """Return a function that runs ranks, and gives by rank what they reported: one run for the same arguments.

    Args:
        paths: where the runs get their folders.
        start: called with a new Ranks and the arguments; returns what the ranks reported once they have succeeded.
    """

    @functools.cache
    def run(*arguments: Any) -> Reports | Exception:
        ranks = Ranks(paths.mktemp("once"))
        try:
            return start(ranks, *arguments)
        except Exception as error:
            return error  # so that a run that fails is not tried again by every test
        finally:
            ranks.end()

    def reported(*arguments: Any) -> Reports:
        found = run(*arguments)
        if isinstance(found, Exception):
            raise found
        return found

    return reported
