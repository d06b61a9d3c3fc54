"""Train the tutorial's network with the tutorial's own data parallelism: an all_reduce of every gradient.

    torchrun --nproc-per-node=2 examples/torch/average_gradients.py
    rankmesh run --nproc-per-node=2 examples/torch/average_gradients.py
    python examples/torch/average_gradients.py --spawn 2    # torch.multiprocessing.spawn

Every rank begins with the same parameters, as all have the same seed, and takes the same steps.
DistributedDataParallel, in ddp_digits.py, also sends the gradients of many parameters together, during the backward
pass.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from digits import Net, load, main, report, train
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def run(options: argparse.Namespace) -> None:
    """Train as a rank."""
    training, test = load()
    model = Net()
    train(model, training, options, average_gradients)
    report(model, model.state_dict(), test)


if __name__ == "__main__":
    main(run, argparse.ArgumentParser(description="Train the tutorial's network with gradients averaged by hand."))
