"""Training with torch's DistributedDataParallel, beyond torch's own tests of it in tests/torch/test_suite.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # everybody's name for it

from support.sides import Cells

cell = Cells()
SIZES = (2, 3)
STEPS = 3


def network() -> nn.Sequential:
    """The same one at every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(rank: int, step: int, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's own inputs and outputs of a step."""
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, width, generator=random), torch.randn(5, 4, generator=random)


def train(model: nn.Module, rank: int, optimizer: Any = None) -> Any:
    """Train a few steps; return every step's loss, and all parameters and buffers."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, outputs = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), outputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state(model)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "many buckets": {"bucket_cap_mb": 1e-4},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters looked for": {"find_unused_parameters": True},
    "everything": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True, "static_graph": True},
}


@cell(sizes=SIZES, options=OPTIONS)
def ddp(dist: Any, rank: int, size: int, options: str) -> Any:
    return train(DDP(network(), **OPTIONS[options]), rank)


@cell(sizes=SIZES)
def parameters_of_several_dtypes(dist: Any, rank: int, size: int) -> Any:
    model = network()
    model[2].to(torch.bfloat16)
    model[4].to(torch.float64)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                dtype = next((parameter.dtype for parameter in layer.parameters()), inputs.dtype)
                inputs = layer(inputs.to(dtype))
            return inputs.float()

    return train(DDP(Mixed()), rank)


@cell(sizes=(2,))
def compiled(dist: Any, rank: int, size: int) -> Any:
    return train(torch.compile(DDP(nn.Sequential(network(), nn.BatchNorm1d(4))), backend="eager"), rank)


@cell(sizes=SIZES)
def in_a_group(dist: Any, rank: int, size: int) -> Any:
    group = dist.new_group([0, 1])
    if rank > 1:
        return None
    told = train(DDP(network(), process_group=group), rank)
    dist.destroy_process_group(group)
    return told


@cell(sizes=SIZES, optimizer=["SGD", "Adam"])
def zero_redundancy(dist: Any, rank: int, size: int, optimizer: str) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: it compiles much when it is imported

    model = DDP(network())
    chosen = ZeroRedundancyOptimizer(model.parameters(), getattr(torch.optim, optimizer), lr=0.05)
    told = train(model, rank, chosen)
    chosen.consolidate_state_dict()
    kept = chosen.state_dict()["state"] if rank == 0 else {}
    return told, {number: dict(values) for number, values in kept.items()}
