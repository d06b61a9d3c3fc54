"""Tests of short time limits, on machines where a process gets no processor for seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from _pytest.outcomes import Failed

_ATTEMPTS = 3


def despite_pauses(test: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat a test, or part of one, up to three times, until it passes.

    A process that is paused finds its time limit over before its ranks have heard of each other, and names more of them
    as missing, and rightly so. A fault of the product shows in every attempt. Each attempt makes its own ranks.
    """

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> Any:
        for _ in range(_ATTEMPTS - 1):
            try:
                return test(*arguments, **named)
            except (Exception, Failed):
                pass
        return test(*arguments, **named)

    return run
