"""Checkpoints of a training, one after each epoch, by torch.distributed.checkpoint: a restarted job goes on from it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

_WHOLE = re.compile(r"epoch-(\d+)")


class EpochCheckpoints:
    """The state of a model and its optimizer after the last epoch that all ranks have completed.

    Each is a folder ``epoch-N``. It has another name while the ranks write, and rank 0 renames it when all have: so a
    rank may be killed at any moment, and the last checkpoint is whole. All ranks must see the same folder.

    Args:
        folder: where the checkpoints are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def restore(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Fill both from the last checkpoint, on all ranks; return the epochs done by then, 0 without a checkpoint."""
        done = [self._last() if dist.get_rank() == 0 else 0]
        dist.broadcast_object_list(done)  # all read the same one, and none writes before rank 0 has deleted the rest
        if done[0]:
            state = _state(model, optimizer)
            checkpoint.load(state, checkpoint_id=self._path(done[0]))
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return done[0]

    def save(self, epochs: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Write the state after so many epochs, on all ranks, in place of the former checkpoint."""
        new = self.folder / f"epoch-{epochs}.new"
        checkpoint.save(_state(model, optimizer), checkpoint_id=new)  # returns at rank 0 when all ranks have written
        if dist.get_rank() == 0:
            self._delete_all_but(new.rename(self._path(epochs)))

    def remove(self) -> None:
        """Delete the checkpoints: the training is done."""
        if dist.get_rank() == 0:
            self._delete_all_but(None)

    def _last(self) -> int:
        """Return the epochs of the last whole checkpoint, 0 without one; delete what else a killed job has left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = (_WHOLE.fullmatch(path.name) for path in self.folder.iterdir())
        last = max((int(found[1]) for found in whole if found), default=0)
        self._delete_all_but(self._path(last))
        return last

    def _delete_all_but(self, kept: Path | None) -> None:
        for path in self.folder.glob("epoch-*"):
            if path != kept:
                shutil.rmtree(path.rename(path.with_suffix(".old")))  # half a folder must not look like a whole one

    def _path(self, epochs: int) -> Path:
        return self.folder / f"epoch-{epochs}"


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
