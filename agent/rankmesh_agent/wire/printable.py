"""Foreign text without control characters, which could control a terminal or hide a part of it, and surrogates."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_CONTROL}\\t\\n]")
printable_lines: Callable[[str], str] = partial(re.compile(f"[{_CONTROL}]").sub, "\N{REPLACEMENT CHARACTER}")
"""As ``printable``, but tabs and the ends of lines stay."""


def printable(text: object) -> str:
    """Return a text with control characters and lone surrogates replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))
