"""Foreign text without control characters, which could control a terminal or hide a part of it, and surrogates."""

from __future__ import annotations

import re

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_CONTROL}\\t\\n]")
_UNPRINTABLE_IN_LINES = re.compile(f"[{_CONTROL}]")


def printable(text: object, *, lines: bool = False) -> str:
    """Return a text with control characters, unless they are of ``lines``, and lone surrogates replaced."""
    return (_UNPRINTABLE_IN_LINES if lines else _UNPRINTABLE).sub("\N{REPLACEMENT CHARACTER}", str(text))
