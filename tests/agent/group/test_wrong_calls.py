"""The table of wrong calls over communicators and over HTTP; three ranks as threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from support.sweep.media import NPY, OverCommunicator, over_http
from support.threads import in_threads, world
from support.wrong import MISMATCHED, SIZE, UNDEFINED, WRONG, expressible
from support.wrong_attempts import Attempts, check_invalid, check_mismatched, try_invalid, try_mismatched


@contextlib.contextmanager
def apis_over(medium: str) -> Iterator[list[Any]]:
    """The API of each rank over a medium, by rank."""
    with world(SIZE, medium if medium == "segment" else "tcp", hosts="aab" if medium == "hosts" else "") as made:
        if medium == "http":
            with over_http(made, NPY) as apis:
                yield apis
        else:
            yield [OverCommunicator(comm) for comm in made.communicators]


INVALID = {
    "communicator": [name for name in expressible(WRONG, "communicator") if WRONG[name].says == UNDEFINED],
    "http": expressible(WRONG, "http"),
}
"""A communicator checks operations; all else, the SDK and the endpoints check before."""


@pytest.fixture(scope="module", params=["tcp", "segment", "hosts", pytest.param("http", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> tuple[str, list[Attempts]]:
    """The kind of a medium, and what came of its wrong calls, by rank."""
    kind = "http" if request.param == "http" else "communicator"

    def run(rank: int) -> Attempts:
        invalid = try_invalid(apis[rank], rank, INVALID[kind])
        return invalid | try_mismatched(apis[rank], rank, expressible(MISMATCHED, kind), queued=kind != "http")

    with apis_over(request.param) as apis:
        return kind, in_threads(SIZE, run)


def test_an_invalid_call_raises_before_anything_is_sent(found: tuple[str, list[Attempts]]) -> None:
    kind, of_ranks = found
    for name in INVALID[kind]:
        check_invalid(name, of_ranks, http=kind == "http")


def test_a_mismatch_raises_on_every_rank(found: tuple[str, list[Attempts]]) -> None:
    kind, of_ranks = found
    for name in expressible(MISMATCHED, kind):
        check_mismatched(name, of_ranks)
