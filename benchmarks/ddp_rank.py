"""The program of a rank that trains with torch's DistributedDataParallel, and times its steps when told to.

torchrun … -m benchmarks.ddp_rank BACKEND SOCKET
"""

from __future__ import annotations

import copy
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.channel import Channel
from benchmarks.rank import LIFETIME, timed

WARM_UP = 3
"""Steps before the first timing: DDP makes its buckets anew after the first backward pass."""


def mlp() -> nn.Module:
    """A multi-layer perceptron of 10 million parameters."""
    layers = [part for widths in pairwise((784, 2048, 2048, 2048)) for part in (nn.Linear(*widths), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(2048, 10), nn.LogSoftmax(dim=1))


def net() -> nn.Module:
    """The network of PyTorch's tutorial "Writing Distributed Applications": 22 thousand parameters."""
    first = nn.Sequential(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(10, 20, kernel_size=5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU())
    last = nn.Sequential(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10))
    return nn.Sequential(first, second, last, nn.LogSoftmax(dim=1))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "mlp": (mlp, 32, {}),
    "mlp_in_buckets": (mlp, 32, {"gradient_as_bucket_view": True}),
    "net": (net, 64, {}),
}
"""How each is made, how many samples a rank has in a step, and options of DDP."""


class Trainer:
    """Trains a model on made-up images of 28 by 28 pixels. With a learning rate of 0: all steps are alike.

    Args:
        model: what to train.
        samples: of a step.
        options: of DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, samples: int, **options: Any) -> None:
        random = torch.Generator().manual_seed(dist.get_rank())  # each rank has images of its own
        self._images = torch.randn(samples, 1, 28, 28, generator=random)
        self._labels = torch.randint(10, (samples,), generator=random)
        self._flights = Flights()
        watched = DistributedDataParallel(copy.deepcopy(model), **options)
        watched.register_comm_hook(self._flights, Flights.hook)
        self._watched, self._model = watched, DistributedDataParallel(model, **options)
        self._optimizers = {each: torch.optim.SGD(each.parameters(), lr=0.0) for each in (self._model, watched)}
        for _ in range(WARM_UP):
            self.step()
            self.watched_step()

    def step(self, model: DistributedDataParallel | None = None) -> None:
        """Make a step: forward, backward with all gradients averaged, optimizer."""
        model = model or self._model
        optimizer = self._optimizers[model]
        optimizer.zero_grad()
        nn.functional.nll_loss(model(self._images), self._labels).backward()
        optimizer.step()

    def step_alone(self) -> None:
        """Make the same step without communication."""
        with self._model.no_sync():
            self.step()

    def watched_step(self) -> None:
        """Make a step of which ``overlap`` tells."""
        self._flights.begin()
        self.step(self._watched)

    def overlap(self) -> float:
        """Make a step; return which share of the time buckets are in flight is over when the last gradient is there."""
        self.watched_step()
        return self._flights.overlap()

    def all_reduce(self) -> None:
        """Sum up the buckets of a step and nothing else, begun together as DDP does."""
        works = [dist.all_reduce(bucket, async_op=True) for bucket in self._flights.buckets]
        for work in works:
            work.wait()

    def check(self) -> None:
        """Make sure that DDP's gradients are the mean of all ranks'.

        Raises:
            ArithmeticError: they are not.
        """
        found = []
        for step in (self.step_alone, self.step):
            torch.manual_seed(0)  # of the dropout
            step()
            found.append(torch.cat([parameter.grad.reshape(-1) for parameter in self._model.parameters()]))
        alone, averaged = found
        everyones = [torch.empty_like(alone) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, alone)
        wanted = torch.stack(everyones).mean(dim=0)
        if not torch.allclose(averaged, wanted, rtol=1e-4, atol=1e-6):
            worst = (averaged - wanted).abs().max().item()
            raise ArithmeticError(f"rank {dist.get_rank()}: a gradient is {worst:g} off the mean of all ranks'")


class Flights:
    """The buckets of a step: when each was ready to go, and when its mean was there.

    Attributes:
        buckets: tensors of the buckets' sizes.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the last step's."""
        self.buckets: list[torch.Tensor] = []
        self._began: list[float] = []
        self._ended: dict[int, float] = {}

    def hook(self, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations that are text
        """Average a bucket over all ranks: what DDP does without a hook, and the times besides."""
        number = len(self._began)
        self.buckets.append(torch.zeros_like(bucket.buffer()))
        self._began.append(time.perf_counter())
        buffer = bucket.buffer().div_(dist.get_world_size())

        def ended(future: Any) -> torch.Tensor:
            self._ended[number] = time.perf_counter()
            return future.value()[0]

        return dist.all_reduce(buffer, async_op=True).get_future().then(ended)

    def overlap(self) -> float:
        """Return the share of the buckets' times that is before the last one begins."""
        last = self._began[-1]
        times = [(began, self._ended[number]) for number, began in enumerate(self._began)]
        return sum(max(0.0, min(ended, last) - began) for began, ended in times) / sum(e - b for b, e in times)


def figures(trainer: Trainer, steps: int, repetitions: int) -> list[list[float]]:
    """Return for each repetition seconds of a step, of one alone and of its buckets' all_reduce, and the overlap."""
    trainer.check()
    found = []
    for _ in range(repetitions):
        seconds = []
        for call in (trainer.step, trainer.step_alone, trainer.all_reduce):
            dist.barrier()
            seconds.append(timed(call, steps) / steps)
        found.append([*seconds, trainer.overlap()])
    return found


def main(backend: str, path: str) -> None:
    """Join, and obey until the benchmark closes the socket."""
    signal.alarm(LIFETIME)
    torch.set_num_threads(1)
    channel = Channel.connect(Path(path))
    dist.init_process_group(backend)
    trainers = {}
    for name, (make, samples, options) in MODELS.items():
        torch.manual_seed(0)
        trainers[name] = Trainer(make(), samples, **options)
    channel.send({"rank": dist.get_rank(), "size": dist.get_world_size(), "version": f"torch {torch.__version__}"})
    while (order := channel.receive()) is not None:
        trainer = trainers[order["operation"]]
        channel.send({"seconds": figures(trainer, order["calls"], order["repetitions"])})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
