"""The programs of examples/torch, as far as they go on inside of a process group."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import torch

from support.cells.sharding import common_folder
from support.sides import Cells

cell = Cells()


@cell(sizes=(2,), program=["ddp_digits", "fsdp_digits", "average_gradients"])
def example(dist: Any, rank: int, size: int, program: str) -> list[str]:
    folder = str(Path(__file__).resolve().parents[3] / "examples" / "torch")
    if folder not in sys.path:
        sys.path.append(folder)
    torch.manual_seed(importlib.import_module("digits").SEED)
    with common_folder(dist, rank) as place, contextlib.redirect_stdout(io.StringIO()) as output:
        options = argparse.Namespace(epochs=2, batch=64, lr=0.05, checkpoint=place)
        importlib.import_module(program).run(options)
    return output.getvalue().replace(place, "FOLDER").splitlines()
