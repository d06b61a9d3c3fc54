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
    """The functions of a library for torch's tensors, torch.distributed or another one, for NumPy's arrays."""

    def __init__(self, library: Any = torch.distributed) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, _RENAMED.get(name, name))

        @functools.wraps(function, updated=())
        def call(*arguments: Any, **options: Any) -> Any:
            return function(*map(self._in_torch, arguments), **{key: self._in_torch(options[key]) for key in options})

        return call

    def _in_torch(self, value: Any) -> Any:
        """Return an argument as the library takes it."""
        if isinstance(value, list):
            return [self._in_torch(each) for each in value]
        if isinstance(value, ReduceOp):
            return getattr(self._library.ReduceOp, value.name)
        if not isinstance(value, np.ndarray):
            return getattr(value, "__wrapped__", value)  # a P2POp takes the library's own function
        if value.dtype.isbuiltin != 1:  # bfloat16 and float8
            return torch.from_numpy(value.view(f"i{value.itemsize}")).view(getattr(torch, value.dtype.name))
        return torch.from_numpy(value)
