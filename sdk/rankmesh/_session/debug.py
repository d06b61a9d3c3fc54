"""The debug level, and what DETAIL adds to a call: its shapes and where it was made."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Sequence
from typing import Any

from rankmesh._tensors.arrays import describe
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.pending import Details


class DebugLevel(enum.IntEnum):
    """How much is told when the ranks' calls do not fit together; mismatches raise at every level.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch-distributed-debug
    """

    OFF = 0
    INFO = 1
    DETAIL = 2
    """Errors also have every rank's shapes and the line of its program."""


plain = False
"""Whether the level is known to be below DETAIL: a call that asks for nothing in particular then notes nothing."""
_level: DebugLevel | None = None
_PACKAGE = __name__.partition(".")[0]


def get_debug_level() -> DebugLevel:
    """Return the debug level: what set_debug_level said last, at first what the environment says.

    Raises:
        ValueError: RANKMESH_DEBUG or TORCH_DISTRIBUTED_DEBUG is none of OFF, INFO, DETAIL.
    """
    return set_debug_level_from_env() if _level is None else _level


def set_debug_level(level: DebugLevel | str) -> DebugLevel:
    """Set the debug level from now on; return it.

    Args:
        level: a DebugLevel or its name.

    Raises:
        ValueError: there is no such level.
    """
    global _level, plain
    try:
        _level = DebugLevel[level.upper()] if isinstance(level, str) else DebugLevel(level)
    except (KeyError, ValueError):
        raise ValueError(f"debug level {level!r} is none of OFF, INFO, DETAIL") from None
    plain = _level is not DebugLevel.DETAIL
    return _level


def set_debug_level_from_env() -> DebugLevel:
    """Set the debug level to RANKMESH_DEBUG, or else TORCH_DISTRIBUTED_DEBUG; OFF without them. Return it.

    Raises:
        ValueError: the variable is none of OFF, INFO, DETAIL.
    """
    return set_debug_level(Settings.from_env(os.environ).debug)


def note_of(tensors: Sequence[Any]) -> Details:
    """Return what tells a call's shapes and where it was made, None below DETAIL."""
    if (_level if _level is not None else get_debug_level()) is not DebugLevel.DETAIL:
        return None
    # Now, because the arrays may change meanwhile; the call site first, because a long list is cut off.
    words = ", ".join([f"called at {_call_site()}", *map(describe, tensors)])
    return lambda: words


def _call_site() -> str:
    """Return file, line and function of the nearest frame outside this package, and outside what enters batch()."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _within(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"


def _within(module: str) -> bool:
    return module.partition(".")[0] in (_PACKAGE, "contextlib")
