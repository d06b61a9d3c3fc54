"""Functions of notebooks and interactive sessions, which the processes of ``spawn`` cannot import: sent by value."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable
from typing import Any


class _ByValue:
    """A function that is pickled by value; unpickling returns the function itself."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle

        return pickle.loads, (cloudpickle.dumps(self._fn),)


def importable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as a new process can unpickle it.

    Raises:
        TypeError: it is defined in a notebook or an interactive session, and cloudpickle is not installed.
    """
    defined = fn
    while isinstance(defined, functools.partial):
        defined = defined.func
    if getattr(defined, "__module__", "") != "__main__" or hasattr(sys.modules["__main__"], "__file__"):
        return fn
    if importlib.util.find_spec("cloudpickle") is None:
        name = getattr(defined, "__qualname__", repr(defined))
        raise TypeError(
            f"{name} is defined in a notebook or an interactive session, so a new process cannot import it: install "
            'cloudpickle, define it in a module, or call start_processes(..., start_method="fork")'
        )
    return _ByValue(fn)
