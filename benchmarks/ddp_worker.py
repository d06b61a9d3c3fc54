"""The program of a rank that trains with torch's DistributedDataParallel and times its steps on order.

torchrun … -m benchmarks.ddp_worker BACKEND SOCKET
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.worker import LIFETIME, timed
from benchmarks.workers import Channel

WARM_UP = 3
"""Steps before the first timing: DDP makes its buckets anew after the first backward pass."""


def mlp() -> nn.Module:
    """A multi-layer perceptron of 10 million parameters."""
    layers = [part for widths in pairwise((784, 2048, 2048, 2048)) for part in (nn.Linear(*widths), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(2048, 10), nn.LogSoftmax(dim=1))


def net() -> nn.Module:
    """The network of PyTorch's tutorial "Writing Distributed Applications": 22 thousand parameters."""
    first = [nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()]
    second = [nn.Conv2d(10, 20, kernel_size=5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10), nn.LogSoftmax(dim=1))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "mlp": (mlp, 32, {}),
    "mlp_in_buckets": (mlp, 32, {"gradient_as_bucket_view": True}),
    "net": (net, 64, {}),
}
"""Constructor, samples of a rank in a step, and options of DistributedDataParallel."""


class Trainer:
    """Trains a model on random images of 28 by 28 pixels, with a learning rate of 0: all steps are alike."""

    def __init__(self, model: nn.Module, samples: int, **options: Any) -> None:
        random = torch.Generator().manual_seed(dist.get_rank())  # each rank has images of its own
        self._images = torch.randn(samples, 1, 28, 28, generator=random)
        self._labels = torch.randint(10, (samples,), generator=random)
        self._model = DistributedDataParallel(model, **options)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        for _ in range(WARM_UP):
            self.step()
        sizes = self._model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
        self._buckets = [torch.zeros(int(nbytes) // 4) for nbytes in sizes if nbytes]

    def step(self) -> None:
        """Make a step: forward, backward with all gradients averaged, optimizer."""
        self._optimizer.zero_grad()
        nn.functional.nll_loss(self._model(self._images), self._labels).backward()
        self._optimizer.step()

    def step_alone(self) -> None:
        """Make the same step without communication."""
        with self._model.no_sync():
            self.step()

    def all_reduce(self) -> None:
        """Reduce the buckets of a step and nothing else, begun together as DDP does."""
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]:
            work.wait()

    def check(self) -> None:
        """Raise ArithmeticError unless DDP's gradients are the mean of all ranks'."""
        found = []
        for step in (self.step_alone, self.step):
            torch.manual_seed(0)  # of the dropout
            step()
            found.append(torch.cat([parameter.grad.reshape(-1) for parameter in self._model.parameters()]))
        mean, averaged = found
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if not torch.allclose(averaged, mean, rtol=1e-4, atol=1e-6):
            worst = (averaged - mean).abs().max().item()
            raise ArithmeticError(f"rank {dist.get_rank()}: a gradient is {worst:g} off the mean of all ranks'")


def main(backend: str, path: str) -> None:
    """Carry out orders until the benchmark closes the socket."""
    signal.alarm(LIFETIME)
    torch.set_num_threads(1)
    channel = Channel.connect(Path(path))
    dist.init_process_group(backend)
    trainers = {}
    for name, (make, samples, options) in MODELS.items():
        torch.manual_seed(0)
        trainers[name] = Trainer(make(), samples, **options)
    version = f"torch {torch.__version__}, DDP over {backend}"
    channel.send({"rank": dist.get_rank(), "size": dist.get_world_size(), "version": version})
    while (order := channel.receive()) is not None:
        trainer, steps, seconds = trainers[order["operation"]], order["calls"], []
        trainer.check()
        for _ in range(order["repetitions"]):
            seconds.append([])
            for call in (trainer.step, trainer.step_alone, trainer.all_reduce):
                dist.barrier()
                seconds[-1].append(timed(call, steps) / steps)
        channel.send({"seconds": seconds})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
