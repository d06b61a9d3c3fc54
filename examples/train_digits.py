"""Train a network on handwritten digits, its gradients averaged over all ranks: synchronous data-parallel SGD.

    rankmesh run --nproc-per-node=4 examples/train_digits.py
    python examples/train_digits.py                 # one rank, no launcher
    rankmesh run --nproc-per-node=4 --max-restarts=3 examples/train_digits.py --checkpoint out/digits.npz
    rankmesh run --nproc-per-node=4 --max-restarts=3 --replace examples/train_digits.py --elastic

Every rank holds the same network and works on its share of the samples, which a DistributedSampler assigns. Each
computes the gradients of its part of a batch, a GradientBucketer averages them over all ranks, and every rank takes the
same step. So the ranks together compute the same as one process with the whole batches, and the script checks that: all
ranks must end with bitwise identical parameters, and rank 0 trains once more, alone and without communication, and must
arrive at the same parameters but for rounding.

With ``--checkpoint`` the state is saved after each epoch. If a rank dies, the launcher starts all of them again
(``--max-restarts``), and they go on after the last epoch that is complete, to the very same parameters. Their number
may change (``--nnodes MIN:MAX``): the single process then takes the batches of as many ranks as each epoch had.

With ``--elastic`` nothing starts again: if a rank dies, the others go on with the step that was under way, and take in
the process that the launcher starts in its place (``--replace``) at the end of the epoch; see elastic.py.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from checkpoint import Checkpoint
from elastic import ElasticTraining
from loss_curve import draw
from network import Momentum, Network
from sklearn.datasets import load_digits
from tqdm import tqdm

import rankmesh as dist
from rankmesh.nn import GradientBucketer
from rankmesh.utils.data import DistributedSampler

SEED = 2024
TEST_SHARE = 0.2
WIDTHS = (64, 64, 32, 10)
"""8 by 8 pixels, two hidden layers, ten digits."""

WANTED_ACCURACY = 0.95
TOLERANCE = 1e-9
"""Largest difference that rounding may cause from the single process's parameters: the summation order differs."""


class Digits(NamedTuple):
    """Images ``[n, 64]`` with values 0 to 1, and the digits ``[n]`` they show."""

    images: np.ndarray
    labels: np.ndarray


def load() -> tuple[Digits, Digits]:
    """Return scikit-learn's 1797 handwritten digits, always split the same way into training and test set."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images, labels = images[order] / 16, labels[order]
    tested = round(TEST_SHARE * len(labels))
    return Digits(images[tested:], labels[tested:]), Digits(images[:tested], labels[:tested])


def epoch_batches(
    samples: int, options: argparse.Namespace, epoch: int, *, rank: int, size: int
) -> Iterator[np.ndarray]:
    """Yield the indices of a rank's part of each batch of an epoch: see ``batches``."""
    sampler = DistributedSampler(range(samples), num_replicas=size, rank=rank, seed=SEED)
    part = max(1, options.batch // size)  # equally large parts: then the mean of the parts' means is the batch's mean
    sampler.set_epoch(epoch)
    indices = np.array(list(sampler))
    yield from (indices[begin : begin + part] for begin in range(0, len(indices), part))


def batches(samples: int, options: argparse.Namespace, *, rank: int, size: int, first: int = 0) -> Iterator[np.ndarray]:
    """Yield the indices of a rank's part of each batch: another order every epoch, and equally many on all ranks.

    The last batch of an epoch holds the rest. Where the samples cannot be shared out evenly, the epoch's first ones
    come once more. The first epochs can be left out.
    """
    for epoch in range(first, options.epochs):
        yield from epoch_batches(samples, options, epoch, rank=rank, size=size)


def whole_batches(samples: int, options: argparse.Namespace, size: int, before: Sequence[int] = ()) -> list[np.ndarray]:
    """Return the indices of each batch: the parts of all ranks.

    Args:
        samples: their number.
        options: the command line.
        size: number of ranks.
        before: number of ranks in each of the first epochs, if it was another one.
    """
    plan = []
    for epoch, ranks in enumerate([*before, *[size] * (options.epochs - len(before))]):
        parts = (epoch_batches(samples, options, epoch, rank=rank, size=ranks) for rank in range(ranks))
        plan += [np.concatenate(batch) for batch in zip(*parts, strict=True)]
    return plan


class LocalGradients:
    """GradientBucketer of a single process, which averages nothing."""

    def __init__(self, parameters: Mapping[str, np.ndarray]) -> None:
        self.grads = {name: np.empty_like(parameter) for name, parameter in parameters.items()}

    def ready(self, name: str) -> None:
        """Do nothing: the gradient is where it belongs."""

    def wait(self) -> None:
        """Do nothing: all gradients are there."""


def train(
    network: Network,
    digits: Digits,
    plan: Sequence[np.ndarray],
    gradients: GradientBucketer | LocalGradients,
    *,
    rate: float,
    shown: bool = False,
    checkpoint: Checkpoint | None = None,
) -> np.ndarray:
    """Train in place and return the mean loss of every step over our samples.

    Args:
        network: the network.
        digits: the training set.
        plan: the indices of our samples of every step.
        gradients: receives the gradients of the backward pass, and averages them over the ranks.
        rate: learning rate.
        shown: whether to draw a progress bar.
        checkpoint: where to go on, and where to save the state after each epoch. It is equal on all ranks, and so are
            the losses before it: the means over the ranks. The plan's steps before it are not read.
    """
    optimizer = Momentum(network.parameters, rate)
    losses = np.zeros(len(plan))
    velocities = {f"velocity of {name}": velocity for name, velocity in optimizer.velocities.items()}
    state = {**network.parameters, **velocities}
    begin = saved = 0
    if checkpoint is not None:
        begin = saved = checkpoint.steps
        checkpoint.restore({**state, "losses": losses[:begin]})
    if begin and shown:
        print(f"goes on after {begin} of {len(plan)} steps", flush=True)
    steps = range(begin, len(plan))
    for step in tqdm(steps, desc="training", unit=" steps", initial=begin, total=len(plan), disable=not shown):
        ours = plan[step]
        losses[step] = network.backward(digits.images[ours], digits.labels[ours], gradients.grads, gradients.ready)
        gradients.wait()
        optimizer.step(gradients.grads)
        done = step + 1
        if checkpoint is not None and checkpoint.is_due(done):
            dist.all_reduce(losses[saved:done], dist.ReduceOp.AVG)
            saved = done
            checkpoint.save(done, {**state, "losses": losses[:done]})
    return losses


def flat(network: Network) -> np.ndarray:
    """Return all parameters of a network in one array."""
    return np.concatenate([parameter.ravel() for parameter in network.parameters.values()])


def identical_on_all_ranks(array: np.ndarray) -> bool:
    """Return whether this array has the very same bytes on every rank."""
    digest = np.frombuffer(hashlib.sha256(array.tobytes()).digest(), np.uint8)
    digests = [np.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    return all(np.array_equal(digest, other) for other in digests)


def report(
    network: Network,
    losses: np.ndarray,
    plan: Sequence[np.ndarray],
    training: Digits,
    test: Digits,
    options: argparse.Namespace,
) -> bool:
    """Compare with one process on its own, draw the loss curve, and return whether all is well. For rank 0.

    Args:
        network: after the training.
        losses: of each step.
        plan: the indices of the samples of every step, all ranks together.
        training, test: the data.
        options: the command line.
    """
    size = dist.get_world_size()
    alone = Network(WIDTHS, SEED)
    losses_alone = train(alone, training, plan, LocalGradients(alone.parameters), rate=options.lr)
    difference = float(np.abs(flat(network) - flat(alone)).max())
    accuracy = network.accuracy(test.images, test.labels)
    draw(
        {f"{size} rank{'s' * (size > 1)}": losses, "single process": losses_alone},
        epochs=options.epochs,
        title=f"Handwritten digits, {accuracy:.1%} of the test set right",
        path=options.out,
    )
    same = difference <= TOLERANCE
    print(f"single process: {'equal' if same else 'DIFFERENT'}, max difference of a parameter {difference:.1e}")
    print(f"test accuracy: {accuracy:.2%} (wanted: at least {WANTED_ACCURACY:.0%})")
    print(f"loss curve: {options.out}")
    return same and accuracy >= WANTED_ACCURACY


def run_elastically(options: argparse.Namespace) -> bool:
    """Train as a rank of a world that may change; return whether all checks of this rank passed."""
    training, test = load()
    network = Network(WIDTHS, SEED)
    plan = whole_batches(len(training.labels), options, 1)
    elastic = ElasticTraining(
        network, *training, plan, rate=options.lr, every=len(plan) // options.epochs, patience=options.patience
    )
    elastic.run()
    well = identical_on_all_ranks(flat(network))
    if dist.get_rank() == 0:
        print("all ranks identical" if well else "RANKS DIFFER")
        well = report(network, elastic.losses, plan, training, test, options) and well
    return well


def run(options: argparse.Namespace) -> bool:
    """Train as a rank of the world; return whether all checks of this rank passed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    training, test = load()
    network = Network(WIDTHS, SEED)
    began = time.perf_counter()
    samples = len(training.labels)
    checkpoint, before = None, []
    plan: list[np.ndarray] = []
    if options.checkpoint:
        every = len(list(epoch_batches(samples, options, 0, rank=rank, size=size)))
        settings = (options.epochs, options.batch, options.lr)
        checkpoint = Checkpoint(options.checkpoint, every=every, settings=settings)
        before, plan = checkpoint.sizes, [np.empty(0, int)] * checkpoint.steps
    plan += batches(samples, options, rank=rank, size=size, first=len(before))
    gradients = GradientBucketer(network.parameters)
    losses = train(network, training, plan, gradients, rate=options.lr, shown=rank == 0, checkpoint=checkpoint)
    took = time.perf_counter() - began
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    well = identical_on_all_ranks(flat(network))
    if rank == 0:
        print(f"{len(losses)} steps on {size} rank(s) in {took:.1f} s, loss {losses[0]:.3f} -> {losses[-1]:.4f}")
        print("all ranks identical" if well else "RANKS DIFFER")
        whole = whole_batches(samples, options, size, before)
        well = report(network, losses, whole, training, test, options) and well
    if options.hold:
        hold(options.hold, rank)
    if checkpoint is not None:
        checkpoint.remove()
    return well


def hold(seconds: float, rank: int) -> None:
    """Stay alive, so that the job can be observed from outside."""
    if rank == 0:
        gateway = f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"holding for {seconds:g} s: curl {gateway}/health", flush=True)
    time.sleep(seconds)


def join() -> None:
    """Join the world that the launcher's environment describes; without a launcher, make a world of one rank."""
    if "MASTER_ADDR" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free_port = probe.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line (None: this process's)."""
    parser = argparse.ArgumentParser(
        description="Train a network on handwritten digits by synchronous SGD over all ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=30, help="times to go through the training set")
    parser.add_argument("--batch", type=int, default=64, help="samples of a batch, split over the ranks")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--out", type=Path, default=Path("out/digits_loss.png"), help="where the loss curve goes")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save the state here after each epoch")
    parser.add_argument("--elastic", action="store_true", help="go on when ranks are lost, and take in new ones")
    parser.add_argument(
        "--patience", type=float, default=60, metavar="SECONDS", help="how long --elastic waits for new ranks"
    )
    parser.add_argument("--hold", type=float, default=0, metavar="SECONDS", help="stay alive so long after training")
    return parser.parse_args(arguments)


def main() -> int:
    """Train as the command line says and return the exit code."""
    options = parse()
    try:
        join()
    except dist.errors.JobEndedError as error:  # the others went on without us, to the end
        print(error)
        return 0
    try:
        return 0 if (run_elastically if options.elastic else run)(options) else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
