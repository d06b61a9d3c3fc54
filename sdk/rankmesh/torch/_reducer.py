"""A Work that torch's C++ keeps has to keep its Python half.

``DDP.join(divide_by_initial_world_size=False)`` gives its Reducer the Work of an all_reduce, which it waits for in
the backward pass. It holds on to the C++ half alone; without the other one, which knows of the call, it waits for
ever.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as c10d

_METHOD = "_set_forward_pass_work_handle"
_kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The latest Work of each Reducer."""


@functools.cache
def keep_reducer_works() -> None:
    """Have Reducers keep the Works they are given, if this torch has that method. Does nothing the second time."""
    given = getattr(c10d.Reducer, _METHOD, None)
    if given is None:
        return

    def keeping(reducer: Any, work: Any, *arguments: Any, **options: Any) -> Any:
        _kept[reducer] = work
        return given(reducer, work, *arguments, **options)

    setattr(c10d.Reducer, _METHOD, keeping)
