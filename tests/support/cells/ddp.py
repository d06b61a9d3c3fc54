"""Training with torch's DistributedDataParallel, and what torch builds on all_reduce and broadcast alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
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


def train(model: nn.Module, rank: int, optimizer: Any = None, after: Callable[[], object] = lambda: None) -> Any:
    """Train a few steps; return every step's loss, and all parameters and buffers."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, outputs = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), outputs)
        loss.backward()
        optimizer.step()
        after()
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
def parameters_begin_as_rank_0_has_them(dist: Any, rank: int, size: int) -> Any:
    torch.manual_seed(rank)
    return state(DDP(nn.Linear(3, 2)))


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


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 4)
        self.choice = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last((self.first, self.second)[self.choice % 2](inputs).relu())


@cell(sizes=SIZES)
def ranks_that_use_different_parameters(dist: Any, rank: int, size: int) -> Any:
    model = Branches()
    model.choice = rank

    def others() -> None:
        model.choice += 1

    return train(DDP(model, find_unused_parameters=True), rank, after=others)


@cell(sizes=SIZES)
def parameters_without_a_gradient(dist: Any, rank: int, size: int) -> str:
    model = DDP(Branches())
    try:
        train(model, rank)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return "trained"


@cell(sizes=SIZES)
def gradients_that_accumulate(dist: Any, rank: int, size: int) -> Any:
    model = DDP(network(), bucket_cap_mb=1e-4)
    gradients = []
    for step in range(2 * STEPS):
        inputs, outputs = batch(rank, step)
        if step % 2:
            nn.functional.mse_loss(model(inputs), outputs).backward()
        else:
            model.zero_grad()
            with model.no_sync():
                nn.functional.mse_loss(model(inputs), outputs).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


@cell(sizes=SIZES)
def uneven_inputs(dist: Any, rank: int, size: int) -> Any:
    model = DDP(network(), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with model.join():
        for step in range(2 + 2 * rank):
            inputs, outputs = batch(rank, step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), outputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, state(model)


@cell(sizes=SIZES)
def uneven_inputs_that_are_a_mistake(dist: Any, rank: int, size: int) -> str:
    model = DDP(network())
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(1 + rank):
                model(batch(rank, step)[0]).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "trained"


def mean_by_hand(dist, bucket):  # torch takes no annotations that are text
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])


@cell(sizes=SIZES, hook=["all_reduce", "float16", "own"])
def hooks(dist: Any, rank: int, size: int, hook: str) -> Any:
    model = DDP(network(), bucket_cap_mb=1e-4)
    known = {
        "all_reduce": default_hooks.allreduce_hook,
        "float16": default_hooks.fp16_compress_hook,
        "own": mean_by_hand,
    }
    model.register_comm_hook(dist if hook == "own" else None, known[hook])
    return train(model, rank)


@cell(sizes=SIZES)
def power_sgd(dist: Any, rank: int, size: int) -> Any:
    model = DDP(network())
    compression = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(compression, powerSGD_hook.powerSGD_hook)
    return train(model, rank)


@cell(sizes=SIZES, broadcast=[True, False])
def buffers(dist: Any, rank: int, size: int, broadcast: bool) -> Any:
    model = network()
    model.insert(1, nn.BatchNorm1d(8))
    return train(DDP(model, broadcast_buffers=broadcast), rank)


@cell(sizes=(2,))
def compiled(dist: Any, rank: int, size: int) -> Any:
    return train(torch.compile(DDP(nn.Sequential(network(), nn.BatchNorm1d(4))), backend="eager"), rank)


@cell(sizes=SIZES)
def sparse_gradients(dist: Any, rank: int, size: int) -> Any:
    torch.manual_seed(1)
    words = nn.Embedding(10, 4, sparse=True)
    model = DDP(nn.Sequential(words, nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor([rank, step, 9])).square().sum().backward()
        seen.append(words.weight.grad.coalesce().to_dense())
        optimizer.step()
    return seen, state(model)


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


@cell(sizes=SIZES)
def models_averaged_now_and_then(dist: Any, rank: int, size: int) -> Any:
    model = network()
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    return train(model, rank, after=lambda: averager.average_parameters(model.parameters()))


@cell(sizes=SIZES)
def ranks_with_different_models(dist: Any, rank: int, size: int) -> str:
    try:
        DDP(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + (rank == 1)))))
    except RuntimeError as error:
        return str(error)
    return "made"
