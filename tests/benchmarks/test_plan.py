"""What is measured."""

from __future__ import annotations

import pytest

from benchmarks.operations import OPERATIONS
from benchmarks.peers import PEERS
from benchmarks.plan import Case, Effort, cases, takes_part


def test_cases_of_one_number_of_ranks_are_together() -> None:
    assert cases(["all_reduce", "barrier"], [2, 4], [4, 8]) == [
        Case("all_reduce", 2, 4),
        Case("all_reduce", 2, 8),
        Case("barrier", 2, 0),
        Case("all_reduce", 4, 4),
        Case("all_reduce", 4, 8),
        Case("barrier", 4, 0),
    ]


def test_what_two_ranks_do_is_not_measured_with_more() -> None:
    assert cases(["send_recv"], [2, 4], [4]) == [Case("send_recv", 2, 4)]


def test_mpi_has_no_half_types() -> None:
    assert not takes_part(PEERS["mpi"], Case("all_reduce_float16", 2, 4))
    assert takes_part(PEERS["gloo"], Case("all_reduce_float16", 2, 4))


def test_libraries_left_out_are_those_of_peers() -> None:
    libraries = {peer.library for peer in PEERS.values()}
    assert all(operation.without < libraries for operation in OPERATIONS.values())


@pytest.mark.parametrize(("seconds_a_call", "calls"), [(1e-9, 50), (0.01, 10), (5.0, 1)])
def test_calls_fill_the_time(seconds_a_call: float, calls: int) -> None:
    assert Effort(seconds=0.1, most_calls=50).calls(seconds_a_call) == calls
