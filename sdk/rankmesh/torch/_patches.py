"""torch.compile looks into all Python that runs beside what it compiles. A group's methods are not to be looked into.

DistributedDataParallel calls them between the parts of a model that are compiled. Dynamo then compiles them, too, as if
they were the user's code, and fails: to it a process group is opaque, with C++'s attributes alone. ``torch.compiler``'s
way of excluding functions loads Dynamo, which takes longer than everything else a rank loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # another torch: its Dynamo may or may not get along with these methods
    _skip = None
else:
    _skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # this function, and what it calls


def untraced(function: Function) -> Function:
    """Have Dynamo leave a function alone, and all that it calls."""
    if _skip is not None:
        set_code_exec_strategy(function.__code__, _skip)
    return function
