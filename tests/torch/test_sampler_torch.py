"""The sampler beside torch's own, and in torch's DataLoader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.utils.data

from rankmesh.utils.data import DistributedSampler

Torchs = torch.utils.data.DistributedSampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("replicas", range(1, 8))
def test_without_shuffling_the_indices_are_torchs(replicas: int, drop_last: bool) -> None:
    for samples in range(25):
        for rank in range(replicas):
            arguments: Any = (range(samples), replicas, rank, False, 0, drop_last)
            ours, torchs = DistributedSampler(*arguments), Torchs(*arguments)
            assert list(ours) == list(torchs)
            assert len(ours) == len(torchs)
            assert (ours.num_samples, ours.total_size) == (torchs.num_samples, torchs.total_size)


def pattern(sampler: Any, replicas: int, samples: int, epoch: int) -> np.ndarray:
    """Return what was dealt, each index replaced by the place at which it was dealt first."""
    dealt = []
    for rank in range(replicas):
        one = sampler(range(samples), replicas, rank, True, seed=11)
        one.set_epoch(epoch)
        dealt.append(list(one))
    order = np.array(dealt).T.ravel()
    return np.array([np.flatnonzero(order == index)[0] for index in order])


@pytest.mark.parametrize(("replicas", "samples"), [(1, 10), (2, 9), (3, 9), (4, 10), (7, 3)])
def test_with_shuffling_only_the_permutation_differs(replicas: int, samples: int) -> None:
    for epoch in range(3):
        ours, torchs = (pattern(sampler, replicas, samples, epoch) for sampler in (DistributedSampler, Torchs))
        assert ours.tolist() == torchs.tolist()


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1])
def test_it_takes_the_seeds_that_torch_takes(seed: int) -> None:
    for sampler in (DistributedSampler, Torchs):
        assert sorted(sampler(range(9), 1, 0, seed=seed)) == list(range(9))  # type: ignore[operator]


@pytest.mark.parametrize("arguments", [(3, 3), (3, -1), (0, 0), (None, 0), (2, None)])
def test_it_refuses_what_torch_refuses(arguments: tuple[Any, Any]) -> None:
    for sampler in (DistributedSampler, Torchs):
        with pytest.raises(ValueError):  # noqa: PT011  # the words are each one's own
            sampler(range(10), *arguments)  # type: ignore[operator]


@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_data_loader_takes_it(workers: int) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(10) * 10)
    sampler = DistributedSampler(dataset, 2, 1, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=workers)
    assert [batch.tolist() for (batch,) in loader] == [[10, 30], [50, 70], [90]]
    assert len(loader) == 3
