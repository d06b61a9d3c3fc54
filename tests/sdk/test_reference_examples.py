"""The reference pages' examples give the output they document, at the number of ranks they document."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.once import Reports, once
from support.processes import Me
from support.reference import EXAMPLES, shown

import rankmesh as dist

pytestmark = pytest.mark.processes

Printed = Callable[[int], Reports]


def all_examples(me: Me) -> None:
    me.init(timeout=60)
    for name, example in EXAMPLES.items():
        if len(example.shows) == me.size:
            me.report(**{name: list(map(shown, example.run(me.rank, me.size)))})
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What the examples for a number of ranks showed."""
    return once(tmp_path_factory, lambda ranks, size: [rank.reported for rank in ranks.run(all_examples, size)])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_shows_what_its_page_says(printed: Printed, name: str) -> None:
    shows = EXAMPLES[name].shows
    assert [of_rank[name] for of_rank in printed(len(shows))] == [list(map(shown, values)) for values in shows]


# Whole programs
