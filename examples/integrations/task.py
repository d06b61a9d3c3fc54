"""Shared code of this folder's programs: a small regression, a network for it, and the digest of its weights."""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 1234
SAMPLES, FEATURES = 256, 16
EPOCHS, BATCH, RATE = 10, 16, 0.1


def parser() -> argparse.ArgumentParser:
    """Return a parser of the command line, with ``--backend``."""
    made = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--backend", default="rankmesh", help="of torch.distributed")
    return made


def dataset() -> TensorDataset:
    """Return the samples: float32 tensors of shapes (256, 16) and (256, 1); the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs @ weights / 2))


def network() -> nn.Module:
    """Return the network; the same in every process. One thread computes it: ranks share the cores."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def train(model: nn.Module) -> None:
    """Train as torch's tutorials do: each rank with its share of the samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    sampler = DistributedSampler(dataset())
    loader = DataLoader(dataset(), BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def loss(model: nn.Module) -> float:
    """Return the mean squared error over all samples."""
    inputs, targets = dataset().tensors
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), targets).item()


def digest(model: nn.Module) -> str:
    """Return 16 digits of the SHA-256 of the weights, of which sharded ones are gathered."""
    whole = (value.full_tensor() if isinstance(value, DTensor) else value for value in model.state_dict().values())
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in whole)).hexdigest()[:16]


def summary(model: nn.Module, error: float | None = None) -> str:
    """Return a line about the trained model: backend, ranks, loss, digest. All ranks call it.

    Args:
        model: the model.
        error: its loss; by default that of the regression.

    Raises:
        RuntimeError: the ranks have different weights.
    """
    mine = digest(model)
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks have different weights: {', '.join(digests)}")
    error = loss(model) if error is None else error
    return f"{dist.get_backend()}, {len(digests)} ranks: loss {error:.3f}, weights {mine}"


def report(model: nn.Module, error: float | None = None) -> None:
    """Print the summary at rank 0. All ranks call it."""
    line = summary(model, error)
    if dist.get_rank() == 0:
        print(line, flush=True)
