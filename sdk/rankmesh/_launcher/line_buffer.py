"""Splits a stream of bytes into lines as a terminal would finally show them."""

from __future__ import annotations

LONGEST_LINE = 16 << 20
"""Longer lines are split, in bytes, so that a stream without newlines cannot exhaust memory."""


class LineBuffer:
    r"""Splits a stream of bytes into lines.

    A carriage return restarts the line, as on a terminal: only the last state of a progress bar counts. ``\r\n`` is a
    newline. The bytes need not be text.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Append the stream's next bytes; return the lines they complete, without newlines."""
        lines: list[bytes] = []
        first, *others = data.split(b"\n")
        self._append(first, lines)
        for piece in others:
            lines.append(_last_state(self._rest))
            self._rest.clear()
            self._append(piece, lines)
        return lines

    def unfinished(self, most: int = 4096) -> bytes:
        """Return the first ``most`` bytes of the unfinished line."""
        return bytes(self._rest[:most]).rstrip(b"\r")

    def close(self) -> list[bytes]:
        """Return the last line of the stream if it lacks a newline and is not blank."""
        line = _last_state(self._rest)
        self._rest.clear()
        return [line] if line.strip() else []

    def _append(self, data: bytes, lines: list[bytes]) -> None:
        self._rest += data
        if b"\r" in data:
            returned = self._rest.endswith(b"\r")
            self._rest[:] = _last_state(self._rest) + b"\r" * returned
        while len(self._rest) > self._longest:
            lines.append(bytes(self._rest[: self._longest]))
            del self._rest[: self._longest]


def _last_state(line: bytearray) -> bytes:
    shown = line.rstrip(b"\r")
    return bytes(shown[shown.rfind(b"\r") + 1 :])
