"""Training with torch's FSDP2, DTensor and what comes with them: checkpoints, pipelines."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from support.cells.ddp import batch, network
from support.sides import Cells

cell = Cells()
SIZES = (2, 3)
STEPS = 3


def mesh(size: int) -> Any:
    return init_device_mesh("cpu", (size,))


def sharded(size: int, **options: Any) -> nn.Sequential:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh(size), **options)
    return fully_shard(model, mesh=mesh(size), **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    """Train a few steps; return their losses."""
    losses = []
    for step in range(STEPS):
        inputs, outputs = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).float(), outputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parts(model: nn.Module) -> list[Any]:
    """Return what a rank holds of each parameter, and the whole of it."""
    return [(parameter.to_local().detach(), parameter.full_tensor().detach()) for parameter in model.parameters()]


@contextlib.contextmanager
def common_folder(dist: Any, rank: int) -> Iterator[str]:
    """A folder for all ranks, for a while."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    yield folder[0]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


FSDP: dict[str, dict[str, Any]] = {
    "as it is": {},
    "whole until the backward pass": {"reshard_after_forward": False},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "bfloat16, reduced in float32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "float16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
}


@cell(sizes=SIZES, options=FSDP)
def fsdp(dist: Any, rank: int, size: int, options: str) -> Any:
    model = sharded(size, **FSDP[options])
    return steps(model, torch.optim.Adam(model.parameters(), lr=0.05), rank), parts(model)


@cell(sizes=SIZES)
def fsdp_gradients_that_accumulate_and_are_clipped(dist: Any, rank: int, size: int) -> Any:
    model = sharded(size)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        model(batch(rank, step)[0]).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor(), [parameter.grad.full_tensor() for parameter in model.parameters()]


@cell(sizes=SIZES)
def layouts(dist: Any, rank: int, size: int) -> Any:
    whole = torch.arange(35.0).reshape(7, 5)
    by_row = distribute_tensor(whole, mesh(size), [Shard(0)])
    by_column = by_row.redistribute(placements=[Shard(1)])
    terms = DTensor.from_local(whole * (rank + 1), mesh(size), [Partial()])
    product = by_column @ distribute_tensor(whole.T.contiguous(), mesh(size), [Shard(0)])
    return {
        "rows": by_row.to_local(),
        "columns": by_column.to_local(),
        "whole": by_column.full_tensor(),
        "sum": terms.full_tensor(),
        "rows of the sum": terms.redistribute(placements=[Shard(0)]).to_local(),
        "mean": DTensor.from_local(whole + rank, mesh(size), [Partial("avg")]).full_tensor(),
        "maximum": DTensor.from_local(whole * (-1) ** rank, mesh(size), [Partial("max")]).full_tensor(),
        "product": product.redistribute(placements=[Replicate()]).to_local(),
        "softmax": by_row.softmax(0).full_tensor(),
        "total": by_row.sum().full_tensor(),
    }


@cell(sizes=SIZES)
def a_mesh_of_two_dimensions(dist: Any, rank: int, size: int) -> Any:
    grid = init_device_mesh("cpu", (1, size), mesh_dim_names=("rows", "columns"))
    tensor = distribute_tensor(torch.arange(12.0).reshape(2, 6), grid, [Shard(0), Shard(1)])
    total = torch.ones(1)
    dist.all_reduce(total, group=grid.get_group("columns"))
    return tensor.to_local(), tensor.full_tensor(), total, grid["rows"].size()


@cell(sizes=SIZES)
def tensor_parallel(dist: Any, rank: int, size: int) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.LayerNorm(6))
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "3": SequenceParallel(sequence_dim=0),
    }
    parallelize_module(model, mesh(size), plan)
    loss = model(batch(0, 0)[0][:3]).redistribute(placements=[Replicate()]).to_local().square().sum()
    loss.backward()
    return loss.item(), [parameter.grad.full_tensor() for parameter in model.parameters()]


@cell(sizes=SIZES, way=["save", "async_save"])
def checkpoints(dist: Any, rank: int, size: int, way: str) -> Any:
    with common_folder(dist, rank) as folder:
        return checkpointed(folder, rank, size, way)


def checkpointed(folder: str, rank: int, size: int, way: str) -> Any:
    model = sharded(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    steps(model, optimizer, rank)
    names = ("model", "optimizer")
    kept = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    saving = getattr(checkpoint, way)(kept, checkpoint_id=folder)
    if way == "async_save":
        saving.result(timeout=60)
    wanted = parts(model)
    model = sharded(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = parts(model)
    return wanted, found, steps(model, optimizer, rank), parts(model)


@cell(sizes=SIZES)
def pipeline(dist: Any, rank: int, size: int) -> Any:
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(stages[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    inputs = torch.arange(24.0).reshape(4, 6) / 24
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=inputs, losses=losses)
    else:
        schedule.step()
    gradients = [parameter.grad for parameter in stages[rank].parameters()]
    return [loss.item() for loss in losses], gradients
