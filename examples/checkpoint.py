"""Checkpoint of a training in an .npz file: a job that was restarted goes on from there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import rankmesh as dist


class Checkpoint:
    """The state of a training at the end of an epoch, equal on all ranks.

    Rank 0 alone has the file; what it reads goes to the others by a broadcast, so hosts need no common file system. A
    collective call: all ranks make it.

    Args:
        path: the file.
        every: steps of an epoch.
        settings: numbers that the training depends on; a file with others is of another training, and is not used.

    Attributes:
        steps: the steps done when the file was written, 0 without one.
        sizes: the number of ranks in each of the epochs by then; it may change between two epochs.
    """

    def __init__(self, path: Path, *, every: int, settings: Sequence[float]) -> None:
        self.path = path
        self.every = every
        self._settings = np.array(settings, float)
        saved = [self._read() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        self._saved = saved[0] or {}
        self.steps = int(self._saved.get("steps", 0))
        self.sizes = [int(size) for size in self._saved.get("sizes", ())]

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Fill the arrays as they were saved, if there was a file."""
        for name in state if self._saved else ():
            state[name][...] = self._saved[name]

    def is_due(self, steps: int) -> bool:
        """Return whether an epoch ends after so many steps."""
        return steps > self.steps and (steps - self.steps) % self.every == 0

    def save(self, steps: int, state: Mapping[str, np.ndarray]) -> None:
        """Write the arrays on rank 0. A process killed meanwhile leaves the file of the last time, which is whole."""
        if dist.get_rank() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        sizes = [*self.sizes, *[dist.get_world_size()] * ((steps - self.steps) // self.every)]
        with new.open("wb") as file:
            np.savez(file, steps=np.array(steps), sizes=np.array(sizes), settings=self._settings, **state)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)

    def remove(self) -> None:
        """Delete the file: the training is done."""
        if dist.get_rank() == 0:
            self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, np.ndarray] | None:
        if not self.path.exists():
            return None
        with np.load(self.path) as file:
            found = dict(file)
        return found if np.array_equal(found["settings"], self._settings) else None
