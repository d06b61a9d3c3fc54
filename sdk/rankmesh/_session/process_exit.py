"""End of this process, by an uncaught exception or with an exit status, for the errors of ranks that still wait for it.

Python keeps an uncaught exception for its exit handlers, but not a SystemExit and its status. So the calls of
``sys.exit`` are watched while this process is a rank; a status is reported only where the main thread's outermost frame
has not gone on since that call, so that the exception was not caught.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn

from rankmesh_agent.wire.errors import DistError

_MAX_CHARACTERS = 500
_Code = str | int | None
"""Argument of ``sys.exit``."""
_WITHOUT = "without destroy_process_group"


class ProcessExit(NamedTuple):
    """How a process ends.

    Attributes:
        reason: the failure that ends it, empty if there is none.
        raised: whether an exception ends it.
        error: that exception, or its explicit cause, if it is one of RankMesh's.
        exit_text: how it ends without a failure.
        place: the innermost line of the user's code that an exception passed through.
    """

    reason: str = ""
    raised: bool = False
    error: DistError | None = None
    exit_text: str = ""
    place: str = ""


class _ExitHook:
    """Takes the place of ``sys.exit``, and records the status and the place of the latest call in the main thread.

    Args:
        exit_function: raises SystemExit.
    """

    def __init__(self, exit_function: Callable[[_Code], NoReturn]) -> None:
        self.exit_function = exit_function
        self._frame: FrameType | None = None
        self._place = -1
        self._status: _Code = None

    def __call__(self, status: _Code = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            frame = sys._getframe()
            while frame.f_back is not None:
                frame = frame.f_back
            self._frame, self._place, self._status = frame, frame.f_lasti, status
        self.exit_function(status)

    def status(self) -> int | None:
        """Return the exit status, None if it is not known."""
        if self._frame is None or self._frame.f_lasti != self._place:
            return None
        return exit_status(self._status)


_watch: _ExitHook | None = None


def watch_exit() -> None:
    """Watch the calls of ``sys.exit`` from now on. Does nothing the second time."""
    global _watch
    if _watch is None:
        _watch = _ExitHook(sys.exit)
        sys.exit = _watch


def unwatch_exit() -> None:
    """Restore ``sys.exit``, unless another library has replaced it since."""
    global _watch
    if _watch is not None and sys.exit is _watch:
        sys.exit = _watch.exit_function  # type: ignore[assignment]
        _watch = None


def exit_status(code: _Code) -> int:
    """Return the exit status of the process for the code of a SystemExit."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def print_instead(error: KeyboardInterrupt, line: str) -> None:
    """Have Python print a line in place of an exception's traceback, if it is not caught; nothing if that is empty."""
    error._rankmesh_line = line  # type: ignore[attr-defined]
    if not isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(sys.excepthook)


def fold_tracebacks() -> None:
    """Have Python print uncaught exceptions without RankMesh's frames, unless another library prints them."""
    if sys.excepthook is sys.__excepthook__:
        from rankmesh._launcher.tracebacks import print_exception

        sys.excepthook = print_exception


class _ExceptHook:
    """Takes the place of ``sys.excepthook``.

    Args:
        print_exception: prints other exceptions.
    """

    def __init__(self, print_exception: Callable[..., object]) -> None:
        self._print_exception = print_exception

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = getattr(error, "_rankmesh_line", None)
        if line is None:
            self._print_exception(kind, error, trace)
        elif line:
            print(line, file=sys.stderr)


def at_exit() -> ProcessExit:
    """Return how the process ends; for exit handlers."""
    error = getattr(sys, "last_value", None)  # Python keeps an uncaught exception there
    if error is not None and not hasattr(sys, "ps1"):  # an interactive session goes on after an exception
        return _ended_with(error)
    status = None if _watch is None else _watch.status()
    if status:
        return ProcessExit(f"it exited with status {status} {_WITHOUT}")
    known = "" if status is None else f" with status {status}"
    return ProcessExit(exit_text=f"it exited{known} {_WITHOUT}")


def at_destroy(error: BaseException | None) -> ProcessExit:
    """Return how the process leaves by destroy_process_group.

    Args:
        error: the exception that is being handled, or propagates through a ``finally``; None if there is none.
    """
    if error is None:
        return ProcessExit()
    text = f"it called destroy_process_group after {_text(error)}"
    return ProcessExit(error=_dist_error(error), exit_text=text, place=_place(error))


def _ended_with(error: BaseException) -> ProcessExit:
    return ProcessExit(f"it ended with {_text(error)}", True, _dist_error(error), place=_place(error))


def _place(error: BaseException) -> str:
    from rankmesh._launcher.tracebacks import place

    return place(error)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_CHARACTERS]


def _dist_error(error: BaseException | None) -> DistError | None:
    """Return the error, or the first of its explicit causes, that is RankMesh's."""
    while error is not None and not isinstance(error, DistError):
        error = error.__cause__
    return error
