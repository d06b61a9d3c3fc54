"""Adaptations of torch to process groups written in Python: for torch.compile, and for DDP's Reducer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as c10d

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # another version of torch, whose Dynamo may trace these methods
    _skip = None
else:
    _skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # this function and its callees

_METHOD = "_set_forward_pass_work_handle"
_kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The latest Work of each Reducer."""


def untraced(function: Function) -> Function:
    """Exclude a function and its callees from torch.compile.

    DistributedDataParallel calls a group's methods between the compiled parts of a model. Dynamo would trace them as
    user code, and fail: it treats a process group as opaque, with only the attributes of C++. ``torch.compiler``'s way
    to exclude functions loads Dynamo, which takes longer than all other imports of a rank.
    """
    if _skip is not None:
        set_code_exec_strategy(function.__code__, _skip)
    return function


def complete_options(module: Any) -> None:
    """Give each call's options ``asyncOp``, which most of them lack in torch 2.7.

    Such calls are queued, and torch waits for the Work of a synchronous one.
    """
    for name in ("AllToAll", "Allreduce", "AllreduceCoalesced", "Barrier", "Gather", "Reduce"):
        kind = getattr(module, f"{name}Options")
        if not hasattr(kind, "asyncOp"):
            kind.asyncOp = True


@functools.cache
def keep_reducer_works() -> None:
    """Make DDP's Reducers keep the Python half of a Work, if this torch needs it. Does nothing the second time.

    ``DDP.join(divide_by_initial_world_size=False)`` passes the Work of an all_reduce to its Reducer, which waits for it
    in the backward pass. The Reducer keeps only the C++ half of the Work, which waits without end once the Python half,
    with the call, is deleted.
    """
    original = getattr(c10d.Reducer, _METHOD, None)
    if original is None:
        return

    def keeping(reducer: Any, work: Any, *arguments: Any, **options: Any) -> Any:
        _kept[reducer] = work
        return original(reducer, work, *arguments, **options)

    setattr(c10d.Reducer, _METHOD, keeping)
