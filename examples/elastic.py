"""Training that goes on when ranks are lost, and takes in those that join: no checkpoint, no restart.

Every rank has the whole state: parameters, velocities, losses. A step changes it only after the gradients of all ranks
are there, so each rank is always between two steps, and at most one step behind another one. Whenever the world has
changed, all ranks take over the state of one that is ahead.

Each batch is shared out among the ranks that are there, whatever their number. So the training computes the same, but
for rounding, as one process with whole batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from network import Momentum, Network

import rankmesh as dist
from rankmesh.nn import GradientBucketer


class ElasticTraining:
    """A training on a world whose ranks come and go. All ranks make it, new ones when they have joined.

    Args:
        network: trained in place.
        images, labels: the training set.
        plan: the indices of the samples of every step, all ranks together.
        rate: learning rate.
        every: steps of an epoch; ranks are taken in between two epochs.
        patience: seconds to wait there for the place of a lost rank to be taken.

    Attributes:
        losses: the mean loss of each step.
    """

    def __init__(
        self,
        network: Network,
        images: np.ndarray,
        labels: np.ndarray,
        plan: Sequence[np.ndarray],
        *,
        rate: float,
        every: int,
        patience: float,
    ) -> None:
        self.losses = np.zeros(len(plan))
        self._network = network
        self._images, self._labels = images, labels
        self._plan = plan
        self._every = every
        self._patience = patience
        self._optimizer = Momentum(network.parameters, rate)
        self._counts = np.array([0, dist.get_world_size()])
        """Steps done, and ranks wanted."""
        velocities = self._optimizer.velocities.values()
        self._state = [*network.parameters.values(), *velocities, self.losses, self._counts]
        self._gradients: GradientBucketer | None = None
        """Of the present world; None if it has changed."""
        self._complete_epochs = 0
        """Epochs after which ranks could join."""

    def run(self) -> None:
        """Train to the end of the plan.

        Raises:
            DistError: more than half of the ranks are lost, or a failure has no rank.
        """
        lost: set[int] = set()
        while self._gradients is None or self._counts[0] < len(self._plan):
            try:
                if lost:
                    self._go_on_without(lost)
                    lost = set()
                if self._gradients is None:
                    self._agree()
                elif self._counts[0] >= (self._complete_epochs + 1) * self._every:
                    self._complete_epochs += 1
                    self._take_in()
                else:
                    self._step(self._gradients)
            except dist.DistBackendError as error:
                lost |= set(error.ranks)  # another one may be lost while the world shrinks
                if not error.ranks or 2 * len(lost) > dist.get_world_size():
                    raise  # of two halves that have lost each other, both would go on

    def _step(self, gradients: GradientBucketer) -> None:
        """Do one step with our part of the batch."""
        step, rank, size = self._counts[0], dist.get_rank(), dist.get_world_size()
        batch = self._plan[step]
        ours = np.array_split(batch, size)[rank]
        weight = len(ours) * size / len(batch)  # the parts need not be equally large
        grads = gradients.grads

        def ready(name: str) -> None:
            grads[name] *= weight
            gradients.ready(name)

        loss = self._network.backward(self._images[ours], self._labels[ours], grads, ready)
        gradients.ready("loss", np.array([loss * weight]))
        gradients.wait()
        self._optimizer.step(grads)  # from here on nothing fails
        self.losses[step] = grads["loss"][0]
        self._counts[0] += 1

    def _go_on_without(self, lost: set[int]) -> None:
        dist.shrink_group(sorted(lost))
        self._gradients = None
        self._say(f"lost rank {', '.join(map(str, sorted(lost)))}")

    def _take_in(self) -> None:
        """Take in the processes that wait; if ranks have been lost, wait for as many to come."""
        missing = self._counts[1] - dist.get_world_size()
        before = dist.group.WORLD
        try:
            if missing > 0:
                dist.grow_group(int(self._counts[1]), timeout=self._patience)
            else:
                dist.grow_group()
        except dist.DistError as error:
            # The world is as before: if it has lost a rank, the next step raises that.
            self._say(f"nobody has joined: {error}")
            self._counts[1] = dist.get_world_size()
        if dist.group.WORLD is not before:
            self._gradients = None

    def _agree(self) -> None:
        """Take over the state of the first rank that is furthest ahead."""
        steps = [np.zeros(1, int) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, self._counts[:1])
        root = int(np.argmax(steps))
        for array in self._state:
            dist.broadcast(array, root)
        self._complete_epochs = self._counts[0] // self._every
        self._counts[1] = max(self._counts[1], dist.get_world_size())
        parameters: Mapping[str, np.ndarray] = {**self._network.parameters, "loss": np.zeros(1)}
        self._gradients = GradientBucketer(parameters)
        self._say("go on" if self._counts[0] else "begin")

    def _say(self, what: str) -> None:
        if dist.get_rank() == 0:
            print(f"step {self._counts[0]}, {dist.get_world_size()} ranks: {what}", flush=True)
