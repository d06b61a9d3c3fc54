"""torch.distributed as a medium of the sweep: tensors that share the memory of the arrays that a cell compares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed

from rankmesh_agent.wire.ops import ReduceOp

_RENAMED = {"all_gather_v": "all_gather", "reduce_scatter_v": "reduce_scatter"}


class OverTorch:
    """The functions of torch.distributed, for NumPy's arrays."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch.distributed, _RENAMED.get(name, name))

        @functools.wraps(function, updated=())
        def call(*arguments: Any, **options: Any) -> Any:
            return function(*map(_in_torch, arguments), **{key: _in_torch(value) for key, value in options.items()})

        return call


def _in_torch(value: Any) -> Any:
    """Return an argument as torch takes it."""
    if isinstance(value, list):
        return [_in_torch(each) for each in value]
    if isinstance(value, ReduceOp):
        return getattr(torch.distributed.ReduceOp, value.name)
    if not isinstance(value, np.ndarray):
        return getattr(value, "__wrapped__", value)  # a P2POp takes torch's own function
    if value.dtype.isbuiltin != 1:  # bfloat16 and float8
        return torch.from_numpy(value.view(f"i{value.itemsize}")).view(getattr(torch, value.dtype.name))
    return torch.from_numpy(value)
