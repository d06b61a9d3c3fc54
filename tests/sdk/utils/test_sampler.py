"""The sampler's rules: padding, dropping, dealing out in turn, and another order every epoch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankmesh.utils.data.distributed
from rankmesh.utils.data import DistributedSampler


def shares(samples: int, replicas: int, **options: Any) -> list[list[int]]:
    return [list(DistributedSampler(range(samples), replicas, rank, **options)) for rank in range(replicas)]


@pytest.mark.parametrize(
    ("samples", "replicas", "drop_last", "wanted"),
    [
        (6, 3, False, [[0, 3], [1, 4], [2, 5]]),
        (7, 3, False, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),  # the first ones once more
        (7, 3, True, [[0, 3], [1, 4], [2, 5]]),  # the last one left out
        (2, 5, False, [[0], [1], [0], [1], [0]]),  # more than once, if need be
        (2, 5, True, [[], [], [], [], []]),
        (0, 2, False, [[], []]),
        (0, 2, True, [[], []]),
        (3, 1, False, [[0, 1, 2]]),
    ],
)
def test_indices_are_dealt_out_in_turn(samples: int, replicas: int, drop_last: bool, wanted: list[list[int]]) -> None:
    assert shares(samples, replicas, shuffle=False, drop_last=drop_last) == wanted


@given(samples=st.integers(0, 50), replicas=st.integers(1, 9), drop_last=st.booleans(), seed=st.integers(-5, 5))
def test_shuffled_shares_are_dealt_out_of_one_order_by_the_same_rules(
    samples: int, replicas: int, drop_last: bool, seed: int
) -> None:
    dealt = [index for turn in zip(*shares(samples, replicas, drop_last=drop_last, seed=seed)) for index in turn]  # noqa: B905
    if drop_last:
        assert len(dealt) == samples - samples % replicas
        assert len(set(dealt)) == len(dealt)
        assert set(dealt) <= set(range(samples))
    else:
        assert len(dealt) == samples + -samples % replicas
        assert sorted(dealt[:samples]) == list(range(samples))
        assert dealt[samples:] == (dealt[:samples] * replicas)[: len(dealt) - samples]


def test_length_is_that_of_a_share() -> None:
    padded, cut = DistributedSampler(range(10), 4, 0), DistributedSampler(range(10), 4, 0, drop_last=True)
    assert (len(padded), padded.num_samples, padded.total_size) == (3, 3, 12)
    assert (len(cut), cut.num_samples, cut.total_size) == (2, 2, 8)


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    sampler = DistributedSampler(range(100), 1, 0, seed=3)
    first = list(sampler)
    assert list(sampler) == first, "without set_epoch nothing changes"
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert second == list(DistributedSampler(range(100), 1, 0, seed=4)), "epochs and seeds add up, as torch's do"
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_order_is_torchs() -> None:
    sampler = DistributedSampler(range(20), 1, 0, seed=5)
    sampler.set_epoch(7)
    assert list(sampler) == [3, 15, 12, 8, 5, 16, 17, 11, 2, 6, 14, 4, 7, 19, 9, 0, 18, 1, 10, 13]


def test_indices_are_plain_integers() -> None:
    assert {type(index) for index in DistributedSampler([*"abc"], 2, 1)} == {int}


@pytest.mark.parametrize(("replicas", "rank"), [(3, 3), (3, -1), (0, 0), (-2, 0)])
def test_a_rank_out_of_range_is_refused(replicas: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is out of range: with num_replicas={replicas}"):
        DistributedSampler(range(10), replicas, rank)


@pytest.mark.parametrize("given_ones", [{}, {"rank": 0}, {"num_replicas": 2}])
def test_without_a_world_it_says_what_to_do(given_ones: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"call init_process_group\(\) first, or pass num_replicas and rank"):
        DistributedSampler(range(10), **given_ones)


@pytest.mark.usefixtures("alone")
def test_the_world_is_the_default() -> None:
    sampler = DistributedSampler(range(10))
    assert (sampler.rank, sampler.num_replicas) == (0, 1)


def test_what_has_no_length_is_refused() -> None:
    with pytest.raises(TypeError, match="len"):
        DistributedSampler(10, 2, 0)  # type: ignore[arg-type]


def test_a_dataset_that_has_grown_is_noticed() -> None:
    dataset = [1, 2, 3]
    sampler = DistributedSampler(dataset, 2, 0)
    dataset.append(4)
    with pytest.raises(RuntimeError, match="had 3 samples when its DistributedSampler was made, and has 4 now"):
        iter(sampler)


def test_it_is_at_both_of_torchs_paths() -> None:
    assert rankmesh.utils.data.distributed.DistributedSampler is DistributedSampler
