"""Training of the digits that goes on without the ranks that die: the survivors shrink the world and take over.

It has the loop of docs/elastic.md. A step's gradient is that of the whole batch, however many ranks share it. So the
parameters are those of an undisturbed run, but for rounding.
"""

from __future__ import annotations

import argparse

import numpy as np
import train_digits
from network import Momentum, Network

import rankmesh as dist
from rankmesh.nn import GradientBucketer

OPTIONS = argparse.Namespace(epochs=30, batch=64, lr=0.05)


def step(network: Network, digits: train_digits.Digits, batch: np.ndarray, gradients: GradientBucketer) -> None:
    """Compute the gradients of a batch: each rank those of its part, weighted by the part's size."""
    size = dist.get_world_size()
    part = np.array_split(batch, size)[dist.get_rank()]
    weight = len(part) * size / len(batch)  # the ranks' gradients are averaged

    def ready(name: str) -> None:
        gradients.grads[name][...] *= weight
        gradients.ready(name)

    network.backward(digits.images[part], digits.labels[part], gradients.grads, ready)
    gradients.wait()


def synchronize(done: int, network: Network, optimizer: Momentum) -> int:
    """Give all ranks the state of rank 0, whose last step may be one more or one less; return its steps."""
    steps = np.array([done])
    for array in (steps, *network.parameters.values(), *optimizer.velocities.values()):
        dist.broadcast(array, src=0)
    return int(steps[0])


def train(network: Network, digits: train_digits.Digits, plan: list[np.ndarray]) -> None:
    """Train in place, with fewer ranks when some have died."""
    optimizer = Momentum(network.parameters, OPTIONS.lr)
    done, lost = 0, set[int]()
    gradients = None
    while done < len(plan):
        try:
            if lost:
                gradients = None
                dist.shrink_group(sorted(lost))
                lost = set()
            if gradients is None:  # in a new world
                done = synchronize(done, network, optimizer)
                gradients = GradientBucketer(network.parameters)
            step(network, digits, plan[done], gradients)
        except dist.DistBackendError as error:
            lost |= set(error.ranks)
        else:
            optimizer.step(gradients.grads)
            done += 1


def main() -> int:
    """Train as a rank; return 0 if all ranks have the same parameters, those of one process on its own."""
    dist.init_process_group()
    training, test = train_digits.load()
    network, alone = (Network(train_digits.WIDTHS, train_digits.SEED) for _ in range(2))
    plan = train_digits.whole_batches(len(training.labels), OPTIONS, size=1)
    train(network, training, plan)
    well = train_digits.identical_on_all_ranks(train_digits.flat(network))
    if dist.get_rank() == 0:
        print("all ranks identical" if well else "RANKS DIFFER")
        train_digits.train(alone, training, plan, train_digits.LocalGradients(alone.parameters), rate=OPTIONS.lr)
        difference = float(np.abs(train_digits.flat(network) - train_digits.flat(alone)).max())
        well = well and difference <= train_digits.TOLERANCE
        print(f"single process: {'equal' if well else 'DIFFERENT'}, max difference of a parameter {difference:.1e}")
        print(f"test accuracy: {network.accuracy(test.images, test.labels):.2%}")
    dist.destroy_process_group()
    return 0 if well else 1
