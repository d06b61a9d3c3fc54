"""The sampler beside torch's own, and in torch's DataLoader."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.utils.data

from rankmesh.utils.data import DistributedSampler

Torchs = torch.utils.data.DistributedSampler


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_indices_are_torchs(drop_last: bool, shuffle: bool) -> None:
    for replicas, samples in itertools.product((1, 2, 3, 7), (0, 1, 2, 3, 7, 20)):
        for rank in range(replicas):
            arguments: Any = (range(samples), replicas, rank, shuffle, 11, drop_last)
            ours, torchs = DistributedSampler(*arguments), Torchs(*arguments)
            for epoch in range(2):
                for sampler in (ours, torchs):
                    sampler.set_epoch(epoch)
                assert list(ours) == list(torchs)
            assert len(ours) == len(torchs)
            assert (ours.num_samples, ours.total_size) == (torchs.num_samples, torchs.total_size)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**32, 2**63, 2**64 - 1])
def test_every_seed_that_torch_takes_gives_the_same_order(seed: int) -> None:
    ours, torchs = (sampler(range(1797), 1, 0, seed=seed) for sampler in (DistributedSampler, Torchs))
    assert list(ours) == list(torchs)


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
