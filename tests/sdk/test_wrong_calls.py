"""Wrong calls raise before anything is sent, mismatched ones raise everywhere; the group goes on. Three ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from support import hosting
from support.once import Reports, once
from support.processes import Me
from support.wrong import CANNOT, MISMATCHED, SIZE, WRONG
from support.wrong_attempts import check_invalid, check_mismatched, try_invalid, try_mismatched

import rankmesh as dist

pytestmark = pytest.mark.processes


def wrong_calls(me: Me) -> None:
    me.init(timeout=60)
    me.report(**try_invalid(dist, me.rank), **try_mismatched(dist, me.rank))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reports]:
    """What the ranks reported over a medium."""
    return once(
        tmp_path_factory,
        lambda ranks, medium: [
            rank.reported for rank in ranks.run(wrong_calls, SIZE, env=hosting.over(medium, ranks.folder, SIZE))
        ],
    )


over_every_medium = pytest.mark.parametrize("medium", ["shm", "tcp", "aab", "attached"])


@over_every_medium
def test_an_invalid_call_raises_before_anything_is_sent(tried: Callable[..., Reports], medium: str) -> None:
    for name in WRONG:
        check_invalid(name, tried(medium))


@over_every_medium
def test_a_mismatch_raises_on_every_rank(tried: Callable[..., Reports], medium: str) -> None:
    for name in MISMATCHED:
        check_mismatched(name, tried(medium))


def test_what_a_medium_cannot_express_is_in_the_table() -> None:
    for reason, pattern in [reason for reasons in CANNOT.values() for reason in reasons.items()]:
        assert any(re.fullmatch(pattern, name) for name in (*WRONG, *MISMATCHED)), reason


@pytest.mark.usefixtures("alone")
def test_factors_that_are_equal_but_for_their_sign_are_not_the_same() -> None:
    for factor in (0.0, -0.0):
        array = np.ones(1)
        dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(factor))
        assert np.signbit(array[0]) == np.signbit(factor)
