"""Errors that are instances of both RankMesh's and torch's classes, for handlers of either."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as c10d

from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
)

P = ParamSpec("P")
T = TypeVar("T")

_COUNTERPARTS: tuple[tuple[type[DistError], str], ...] = (
    (QueueEmptyError, "QueueEmptyError"),
    (DistStoreError, "DistStoreError"),
    (DistNetworkError, "DistNetworkError"),
    (DistBackendError, "DistBackendError"),
    (DistError, "DistError"),
)
"""RankMesh's classes, the most specific first, with the names of torch's."""


def to_torch_error(error: DistError) -> DistError:
    """Return an error with the same content that is also an instance of torch's counterpart of its class."""
    both: type[DistError] = _dual_class(type(error))  # type: ignore[arg-type]  # a class is hashable
    if both is type(error):
        return error
    late = isinstance(error, CollectiveTimeoutError)
    made = both(
        f"{error.message}; the timeout is over" if late else error.message
    )  # torch's wording, which users search for
    vars(made).update(vars(error))
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def translating(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Make a call, and raise its errors as torch's."""
    try:
        return call(*arguments, **options)
    except DistError as error:
        raise to_torch_error(error) from error.__cause__


@functools.cache
def _dual_class(ours: type[DistError]) -> type[DistError]:
    """Return a subclass of an error class and its counterpart in torch, with the name of the former."""
    for kind, name in _COUNTERPARTS:
        torchs = getattr(c10d, name, None)
        if issubclass(ours, kind) and torchs is not None:
            break
    else:
        return ours
    if issubclass(ours, torchs):
        return ours
    space = {"__module__": ours.__module__, "__doc__": ours.__doc__, "__reduce__": _reduce}
    both: type[DistError] = type(ours.__name__, (ours, torchs), space)
    return both


def _reduce(error: DistError) -> tuple[Any, ...]:
    """Pickle by RankMesh's class: the dual class cannot be imported by name."""
    return _rebuild, (type(error).__bases__[0], error.message, error.details())


def _rebuild(ours: type[DistError], message: str, details: dict[str, Any]) -> DistError:
    return _dual_class(ours)(message, **details)  # type: ignore[arg-type]
