"""Debug levels, and the details that DETAIL adds to a call: shapes and call site."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Sequence
from typing import Any

from rankmesh._tensors.layout import describe
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.options import Details
from rankmesh_agent.net.callers import user_frame


class DebugLevel(enum.Enum):
    """Amount of detail in errors about calls that do not match; mismatches raise at every level.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch-distributed-debug
    """

    OFF = 0
    INFO = 1
    DETAIL = 2
    """Errors also name every rank's shapes and the line of its program."""


below_detail = False
"""True if the level is known to be below DETAIL, so that a call needs no details."""
_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Return the debug level: the one set last, at first the one in the environment.

    Raises:
        ValueError: RANKMESH_DEBUG or TORCH_DISTRIBUTED_DEBUG is none of OFF, INFO, DETAIL.
    """
    return set_debug_level_from_env() if _level is None else _level


def set_debug_level(level: DebugLevel | str) -> DebugLevel:
    """Set the debug level; return it.

    Args:
        level: a DebugLevel or its name.

    Raises:
        ValueError: there is no such level.
    """
    global _level, below_detail
    try:
        _level = DebugLevel[level.upper()] if isinstance(level, str) else DebugLevel(level)
    except (KeyError, ValueError):
        raise ValueError(f"debug level {level!r} is none of OFF, INFO, DETAIL") from None
    below_detail = _level is not DebugLevel.DETAIL
    return _level


def set_debug_level_from_env() -> DebugLevel:
    """Set the debug level to RANKMESH_DEBUG, or else TORCH_DISTRIBUTED_DEBUG; OFF without them. Return it.

    Raises:
        ValueError: the variable is none of OFF, INFO, DETAIL.
    """
    return set_debug_level(Settings.from_env(os.environ).debug)


def details_of(tensors: Sequence[Any]) -> Details:
    """Return a function that describes a call's shapes and call site, None below DETAIL."""
    if (_level if _level is not None else get_debug_level()) is not DebugLevel.DETAIL:
        return None
    # Described now, because the arrays may change; the call site first, because a long list is cut off.
    text = ", ".join([f"called at {_call_site()}", *map(describe, tensors)])
    return lambda: text


def _call_site() -> str:
    """Return file, line and function of the user's code that makes the call, or of what stands for it."""
    frame = user_frame() or sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
