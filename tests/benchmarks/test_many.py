"""Worlds of many ranks, many clients of a store, and a job under attack."""

from __future__ import annotations

import pytest
from support.pauses import despite_pauses

from benchmarks import clients, many, starvation
from benchmarks.workers import MeasurementError

pytestmark = pytest.mark.processes

MIB = 1 << 20


@pytest.mark.parametrize(("name", "ranks", "shared"), [("rankmesh-shm", 16, 150 * MIB), ("rankmesh-tcp", 24, MIB)])
def test_a_rank_of_many_takes_few_descriptors_and_little_shared_memory(name: str, ranks: int, shared: int) -> None:
    """It is connected to the ranks that it needs, not to all: to those of the half group if one of them is late."""

    @despite_pauses  # of several: then it is connected to more
    def measure() -> None:
        found = many.measure(name, ranks, descriptors=128, deadline=60)
        assert found.descriptors <= 20 + ranks // 2
        assert found.shared <= shared
        assert many.row(name, found)[0] == name

    measure()


def test_a_world_without_descriptors_says_so() -> None:
    with pytest.raises(MeasurementError, match=r"(?s)2 of 2 ranks failed.*RLIMIT_NOFILE is 9 \(hard limit 9\)"):
        many.measure("rankmesh-tcp", 2, descriptors=9, deadline=60)


def test_clients_of_a_store_are_counted_in_and_woken() -> None:
    found = clients.measure(40, 2)
    assert min(found) > 0


def test_a_job_under_attack_is_compared_with_itself() -> None:
    (found,) = starvation.measure(["guesses"], 1, 0.2)
    assert found.steps > 0
    assert len(found.drops) == 1
    assert found.drops[0] < 1
    assert found.microseconds > 0
    assert found.longest > 0
