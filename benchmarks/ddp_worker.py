"""The program of a rank that trains with torch's DistributedDataParallel and times its steps on order.

torchrun … -m benchmarks.ddp_worker BACKEND SOCKET
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
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


class LanguageModel(nn.Module):
    """A decoder of the size of GPT-2 small: 124 million parameters, of which the first and last layer share 39."""

    def __init__(self, words: int = 50257, length: int = 64, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 12, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logarithm of the probability of each next word: (texts, length) -> (texts * length, words)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.words(tokens) + self.positions.weight[:length], mask=mask, is_causal=True)
        return self.head(hidden).flatten(0, 1).log_softmax(dim=-1)


def images(samples: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random images of 28 by 28 pixels, and their labels."""
    return torch.randn(samples, 1, 28, 28, generator=random), torch.randint(10, (samples,), generator=random)


def text(tokens: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a random text, and the word after each of its words."""
    words = torch.randint(50257, (tokens + 1,), generator=random)
    return words[None, :-1], words[1:]


class Job(NamedTuple):
    """A model and its data: ``make(items, random)`` returns inputs and labels of a step of a rank."""

    model: Callable[[], nn.Module]
    make: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    items: int
    in_buckets: bool = False


JOBS = {
    "mlp": Job(mlp, images, 32),
    "mlp_in_buckets": Job(mlp, images, 32, in_buckets=True),
    "net": Job(net, images, 64),
    "gpt": Job(LanguageModel, text, 64, in_buckets=True),
}
"""Training jobs; the gradients may lie in the buckets (gradient_as_bucket_view)."""


class Trainer:
    """Trains a model on random data, with a learning rate of 0: all steps are alike."""

    def __init__(self, job: Job) -> None:
        random = torch.Generator().manual_seed(dist.get_rank())  # each rank has data of its own
        self._inputs, self._labels = job.make(job.items, random)
        self._model = DistributedDataParallel(job.model(), gradient_as_bucket_view=job.in_buckets)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        for _ in range(WARM_UP):
            self.step()
        sizes = self._model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
        self._buckets = [torch.empty(int(nbytes) // 4).zero_() for nbytes in sizes if nbytes]  # zeros() maps no memory

    def step(self) -> None:
        """Make a step: forward, backward with all gradients averaged, optimizer."""
        self._optimizer.zero_grad()
        nn.functional.nll_loss(self._model(self._inputs), self._labels).backward()
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
            found.append([parameter.grad.clone() for parameter in self._model.parameters()])
        for mean, averaged in zip(*found, strict=True):
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
    name, trainer = "", None
    version = f"torch {torch.__version__}, DDP over {backend}"
    channel.send({"rank": dist.get_rank(), "size": dist.get_world_size(), "version": version})
    while (order := channel.receive()) is not None:
        if order["operation"] != name:
            name, trainer = order["operation"], None  # one model at a time is in memory
            torch.manual_seed(0)
            trainer = Trainer(JOBS[name])
        assert trainer is not None
        steps = order["calls"]
        seconds: list[list[float]] = []
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
