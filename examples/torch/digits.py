"""Shared code of this folder's programs: the digits, the tutorial's network, its training, the start of the ranks.

The network is the one of PyTorch's tutorial "Writing Distributed Applications", for scikit-learn's images of 8 by 8
pixels instead of MNIST's.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from epoch_checkpoints import EpochCheckpoints
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 1234
TESTED = 359
"""A fifth of the 1797 images; the others are for training."""

Program = Callable[[argparse.Namespace], None]
"""Body of a rank, run in the process group."""


class Net(nn.Sequential):
    """Two convolutions and two fully connected layers, with dropout: the logarithms of ten digits' probabilities."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 10, kernel_size=3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 20, kernel_size=3, padding=1), nn.Dropout2d(0.1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(80, 50), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(50, 10), nn.LogSoftmax(dim=1)),
        )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's handwritten digits, always split the same way into training and test set."""
    from sklearn.datasets import load_digits  # here: a process that only starts ranks need not wait for it

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    pixels = (torch.from_numpy(images)[order] / 16).float().reshape(-1, 1, 8, 8)
    digits = torch.from_numpy(labels)[order]
    return TensorDataset(pixels[TESTED:], digits[TESTED:]), TensorDataset(pixels[:TESTED], digits[:TESTED])


def train(
    model: nn.Module,
    training: TensorDataset,
    options: argparse.Namespace,
    average: Callable[[nn.Module], object] = lambda model: None,
    checkpoints: EpochCheckpoints | None = None,
) -> None:
    """Train in place; rank 0 prints the mean loss of every epoch.

    Args:
        model: the network.
        training: the samples of all ranks; each takes its share of them.
        options: of the command line.
        average: called when the gradients of a step are there, for a model that does not average them itself.
        checkpoints: where to go on, and where to save the state after each epoch.
    """
    sampler = DistributedSampler(training, seed=SEED)
    loader = DataLoader(training, max(1, options.batch // dist.get_world_size()), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    model.train()
    begin = 0 if checkpoints is None else checkpoints.restore(model, optimizer)
    if begin:
        say(f"goes on after epoch {begin}")
    for epoch in range(begin, options.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(SEED + epoch)  # of the dropout: an epoch is the same after a restart
        total = torch.zeros(2, dtype=torch.float64)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(images), labels)
            loss.backward()
            average(model)
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)
        say(f"epoch {epoch + 1}: loss {total[0] / total[1]:.8f}")
        if checkpoints is not None:
            checkpoints.save(epoch + 1, model, optimizer)


def report(model: nn.Module, parameters: dict[str, torch.Tensor], test: TensorDataset) -> None:
    """Verify that all ranks have the same parameters, and print the model's accuracy.

    Args:
        model: the trained network; every rank calls it.
        parameters: all of them, whole, by name.
        test: the samples it has not seen.

    Raises:
        RuntimeError: the ranks have different parameters.
    """
    contents = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters.values())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(contents).hexdigest()[:16])
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks have different parameters: {', '.join(digests)}")
    say(f"all ranks identical: {digests[0]}")
    images, labels = test.tensors
    model.eval()
    with torch.no_grad():
        right = model(images).argmax(dim=1) == labels
    say(f"test accuracy: {right.float().mean():.2%}")


def say(line: str) -> None:
    """Print a line at rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(program: Program, parser: argparse.ArgumentParser) -> None:
    """Run a program as the command line says.

    Started by torchrun or ``rankmesh run`` this process is one rank; otherwise it starts ranks itself.

    Args:
        program: body of each rank; a function of a module.
        parser: of the command line, with this program's own options.
    """
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--backend", default="rankmesh", help="of torch.distributed, for example gloo")
    parser.add_argument("--spawn", type=int, default=2, metavar="N", help="ranks to start where no launcher has")
    parser.add_argument("--epochs", type=int, default=10, help="times to go through the training set")
    parser.add_argument("--batch", type=int, default=64, help="samples of a batch, split over the ranks")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(program, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (program, options, f"file://{folder}/store")
        torch.multiprocessing.spawn(run_spawned, arguments, nprocs=options.spawn)


def run_spawned(rank: int, program: Program, options: argparse.Namespace, init_method: str) -> None:
    """Be a rank that ``torch.multiprocessing.spawn`` has started."""
    run(program, options, init_method=init_method, rank=rank, world_size=options.spawn)


def run(program: Program, options: argparse.Namespace, **place: object) -> None:
    """Be a rank: join, run the program, leave.

    Args:
        program: body of the rank.
        options: of the command line.
        place: where the ranks meet and which one this is, if the environment does not say it.
    """
    torch.set_num_threads(1)  # ranks share the cores; and then sums are the same however the ranks were started
    torch.manual_seed(SEED)
    dist.init_process_group(options.backend, **place)
    try:
        program(options)
    finally:
        dist.destroy_process_group()
