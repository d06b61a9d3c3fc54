"""Errors that are RankMesh's and torch's at once: whoever catches either class gets them."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as c10d

from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
)

_COUNTERPARTS: tuple[tuple[type[DistError], str], ...] = (
    (QueueEmptyError, "QueueEmptyError"),
    (DistStoreError, "DistStoreError"),
    (DistNetworkError, "DistNetworkError"),
    (DistBackendError, "DistBackendError"),
    (DistError, "DistError"),
)
"""Ours, the most special first, and the name of torch's."""


def to_torch_error(error: DistError) -> DistError:
    """Return an error that is also an instance of torch's class for its kind, with what it carries."""
    both: type[DistError] = _both(type(error))  # type: ignore[arg-type]  # a class is hashable
    if both is type(error):
        return error
    late = isinstance(error, CollectiveTimeoutError)
    made = both(f"{error.message}; the timeout is over" if late else error.message)  # what people search for
    vars(made).update(vars(error))
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    return made.with_traceback(error.__traceback__)


@functools.cache
def _both(ours: type[DistError]) -> type[DistError]:
    """Return the class that is both; it has the name of ours."""
    for kind, name in _COUNTERPARTS:
        torchs = getattr(c10d, name, None)
        if issubclass(ours, kind) and torchs is not None:
            break
    else:
        return ours
    if issubclass(ours, torchs):
        return ours
    space = {"__module__": ours.__module__, "__doc__": ours.__doc__, "__reduce__": _reduced}
    both: type[DistError] = type(ours.__name__, (ours, torchs), space)
    return both


def _reduced(error: DistError) -> tuple[Any, ...]:
    """Pickle what is ours: a class that is made here has no name to be found by."""
    return _again, (type(error).__bases__[0], error.message, error.details())


def _again(ours: type[DistError], message: str, details: dict[str, Any]) -> DistError:
    return _both(ours)(message, **details)  # type: ignore[arg-type]
