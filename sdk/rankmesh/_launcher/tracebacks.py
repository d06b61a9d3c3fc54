"""Tracebacks of a rank as the launcher shows them: without RankMesh's own frames, unless RANKMESH_DEBUG is set."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from types import TracebackType

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.callers import OWN_PACKAGES, origin
from rankmesh_agent.wire.errors import RankFailedError
from rankmesh_agent.wire.schemas import FrameOrigin

_FRAME = re.compile(r'[ |]*File "(.*?)", line ')
_MAX_PLACES = 10


def fold_tracebacks() -> None:
    """Have Python print a rank's uncaught exceptions as the launcher shows them, unless another library prints them."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_exception


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception; for ``sys.excepthook``.

    If another rank's failure caused it, its text and the user's lines, without a traceback: of many ranks one has
    failed, and the others all say so. Nothing for an interrupted join, whose error has a text: the launcher reports the
    signal once for all ranks.
    """
    if isinstance(error, KeyboardInterrupt) and error.args:
        return
    try:
        follows = isinstance(error, RankFailedError) and (error.__context__ is None or error.__suppress_context__)
        if follows and not _in_full():
            text = "".join([*traceback.format_exception_only(error), _places_text(error)])
        else:
            text = folded(error)
    except Exception:  # what cannot be folded is printed all the same
        text = ""
    if text and sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()
    else:
        sys.__excepthook__(kind, error, trace)
    with contextlib.suppress(ValueError, OSError):  # an invalid setting, a closed standard input
        _debug(error)


def _debug(error: BaseException) -> None:
    """Start pdb at an uncaught exception, under ``--pdb``; say why pdb had no input."""
    settings = Settings.from_env(os.environ)
    if type(error).__name__ == "BdbQuit":  # bdb.BdbQuit: the user has quit, or the input has ended
        if settings.rank is not None and os.path.samestat(os.fstat(0), os.stat(os.devnull)):
            sys.stderr.write(f"  pdb reads {os.devnull}: 'rankmesh run --pdb {settings.rank}' passes its stdin on\n")
    elif settings.pdb and isinstance(error, Exception):
        import pdb  # noqa: T100

        pdb.post_mortem(error.__traceback__)


def folded(error: BaseException) -> str:
    """Return the traceback of an error; one line stands for RankMesh's frames, and those of libraries around them."""
    if _in_full():
        return "".join(traceback.format_exception(error))
    lines: list[str] = []
    run: list[tuple[FrameOrigin, str]] = []
    for text in [*traceback.TracebackException.from_exception(error).format(), ""]:
        frame = _FRAME.match(text)
        kind = _origin(frame[1]) if frame else "user"
        if kind != "user":
            run.append((kind, text))
            continue
        if any(each == "rankmesh" for each, _ in run):
            lines.append(f"  ({len(run)} frames inside RankMesh; RANKMESH_DEBUG=INFO shows them)\n")
        else:
            lines += [text for _, text in run]
        run.clear()
        lines.append(text)
    return "".join(lines)


def place(error: BaseException) -> str:
    """Return the innermost line of the user's code in a traceback: ``train.py:8 in step``; empty without one."""
    return next(iter(_places(error)), "")


def _in_full() -> bool:
    return Settings.from_env(os.environ).debug != "OFF"


def _places(error: BaseException) -> list[str]:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    users = [frame for frame in frames if _origin(frame.filename) == "user"]
    return [f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}" for frame in users[:_MAX_PLACES]]


def _places_text(error: BaseException) -> str:
    places = _places(error)
    return f"  at {', called at '.join(places)}\n" if places else ""


def _origin(file: str) -> FrameOrigin:
    folders = [f"{os.path.dirname(str(sys.modules[name].__file__))}/" for name in OWN_PACKAGES if name in sys.modules]
    return "rankmesh" if file.startswith(tuple(folders)) else origin(file, None)
