"""Options of a call, the same for every collective and message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rankmesh_agent.net.deadline import Deadline

OnComplete = Callable[[], None] | None
"""Called once the data is there, to copy a staged array back, for example."""
Details = Callable[[], str] | None
"""Returns what a mismatch error adds to a rank's call: splits, shapes, call site."""


class Options(NamedTuple):
    """Options of a call.

    Attributes:
        result: the user's arrays, for ``Work.result()``.
        deadline: deadline of a call, counted from its submission also if it is queued; replaces ``timeout``.
    """

    timeout: float
    async_op: bool = False
    result: list[Any] = []  # noqa: RUF012  # never changed
    on_complete: OnComplete = None
    details: Details = None
    deadline: Deadline | None = None
