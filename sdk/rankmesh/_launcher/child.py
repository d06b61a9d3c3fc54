"""Child processes of ``spawn``: the function as they receive it, their body, and the errors that they pass on."""

from __future__ import annotations

import functools
import importlib.util
import io
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from rankmesh._launcher.failure_file import VARIABLE, ChildError
from rankmesh._launcher.signals import kill_when_closed, pdeathsig
from rankmesh_agent.net.interrupts import deliver_interrupts


def run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], method: str, environment: Mapping[str, str]) -> None:
    """Run the function, in each process. A variable of ``environment`` names the file that receives a failure."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by multiprocessing"
    if method == "fork":  # children forked later inherit the write end of the sentinel pipe
        pdeathsig(parent.pid)()
    else:
        kill_when_closed(parent.sentinel)
    for name, value in environment.items():
        os.environ[name] = value
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # which the parent sends
    try:
        deliver_interrupts()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt_once)
        fn(index, *args)
    except SystemExit as error:
        if code := exit_status(error):
            sys.last_value = error
            ChildError(index, code, "").write(environment[VARIABLE])
        raise
    except BaseException as error:
        sys.last_value = error  # as Python does with an uncaught exception: the exit handler reports it to other ranks
        if not isinstance(error, KeyboardInterrupt):
            from rankmesh._launcher.tracebacks import folded, place

            ChildError(index, 1, folded(error), place(error)).write(environment[VARIABLE])
            sys.exit(1)


def exit_status(error: SystemExit) -> int:
    """Return the exit status of the process that a SystemExit ends."""
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once: the terminal sends Ctrl-C to all processes, and the parent forwards it as well.

    A second exception would interrupt the function's cleanup.
    """
    signal.signal(number, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


class ByValue:
    """A function that is pickled by value; unpickling returns the function itself."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # which leaves out the file of a function
            def reducer_override(self, value: Any) -> Any:
                if not isinstance(value, CodeType):
                    return super().reducer_override(value)
                make, parts = self.dispatch_table[CodeType](value)
                return make, tuple(_cell(value.co_filename) if part == "<dynamic-code>" else part for part in parts)

        cells = {_cell(name): each for name, each in linecache.cache.items() if len(each) == 4 and each[1] is None}
        pickled = io.BytesIO()
        Pickler(pickled).dump(self._fn)
        return _received, (pickled.getvalue(), cells)


def _cell(file: str) -> str:
    """Return ``In[3]`` for the file that stands for a notebook's cell, another file as it is."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name = shell.compile.format_code_name(file) if shell is not None else None
    return name[1] if name else file


def _received(pickled: bytes, cells: dict[str, Any]) -> Any:
    """Return a function that was sent by value; ``cells``: the source of a notebook's cells, for tracebacks."""
    linecache.cache.update(cells)
    return pickle.loads(pickled)


def importable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as a new process can unpickle it."""
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
    return ByValue(fn)
