"""Train the tutorial's network with its parameters sharded over the ranks (FSDP2), and save them in a checkpoint.

    torchrun --nproc-per-node=2 examples/torch/fsdp_digits.py
    rankmesh run --nproc-per-node=2 examples/torch/fsdp_digits.py
    python examples/torch/fsdp_digits.py --spawn 2          # torch.multiprocessing.spawn

Every rank holds a part of each parameter, gathers the whole of a layer's when the layer is computed, and receives its
part of the mean gradient afterwards. Each writes its parts to the checkpoint; a new network that reads it is the same.
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.distributed as dist
from digits import Net, load, main, report, say, train
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model's parameters over all ranks, each layer's for itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole parameters, gathered from all ranks."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def run(options: argparse.Namespace) -> None:
    """Train as a rank, write the checkpoint and read it again."""
    training, test = load()
    model = sharded(Net())
    train(model, training, options)
    trained = whole(model)
    report(model, trained, test)

    warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # a former run's, which is replaced
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=options.checkpoint)
    torch.manual_seed(0)  # other parameters than before
    again = sharded(Net())
    state = {"model": again.state_dict()}
    checkpoint.load(state, checkpoint_id=options.checkpoint)
    again.load_state_dict(state["model"])
    if not all(torch.equal(value, trained[name]) for name, value in whole(again).items()):
        raise RuntimeError(f"the checkpoint in {options.checkpoint} is not what was trained")
    say(f"checkpoint in {options.checkpoint}: read again, equal")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the tutorial's network with sharded parameters.")
    parser.add_argument("--checkpoint", default="out/fsdp_digits", metavar="FOLDER", help="where the checkpoint goes")
    main(run, parser)
