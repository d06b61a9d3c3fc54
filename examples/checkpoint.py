"""Checkpoint of a training in an .npz file: a job that was restarted goes on from there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import rankmesh as dist


class Checkpoint:
    """The state of a training after some of its steps, equal on all ranks.

    Rank 0 alone has the file; what it reads goes to the others by a broadcast, so hosts need no common file system.

    Args:
        path: the file.
        every: steps between two checkpoints.
        settings: numbers that the training depends on; a file with others is of another training, and is not used.
    """

    def __init__(self, path: Path, *, every: int, settings: Sequence[float]) -> None:
        self.path = path
        self.every = every
        self._settings = np.array(settings, float)

    def restore(self, state: Mapping[str, np.ndarray]) -> int:
        """Fill the arrays as they were saved, on all ranks; return the steps done by then, 0 without a checkpoint."""
        saved = [self._read() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        found = saved[0]
        if found is None:
            return 0
        for name, array in state.items():
            array[...] = found[name]
        return int(found["steps"])

    def save(self, steps: int, state: Mapping[str, np.ndarray]) -> None:
        """Write the arrays on rank 0. A process killed meanwhile leaves the file of the last time, which is whole."""
        if dist.get_rank() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("wb") as file:
            np.savez(file, steps=np.array(steps), settings=self._settings, **state)
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
