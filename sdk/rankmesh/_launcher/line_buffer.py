"""A stream of bytes cut into lines as a terminal would show them in the end."""

from __future__ import annotations

LONGEST_LINE = 16 << 20
"""A line longer than this many bytes comes in pieces, so that a stream without newlines cannot eat the memory."""


class LineCutter:
    r"""Cuts a stream of bytes into lines.

    A carriage return starts the line over, as on a terminal: of a progress bar that redraws itself only the last state
    counts. ``\r\n`` is a newline. The bytes need not be text.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take the stream's next bytes and return the lines they complete, without their newlines."""
        lines: list[bytes] = []
        first, *others = data.split(b"\n")
        self._append(first, lines)
        for piece in others:
            lines.append(_last_state(self._rest))
            self._rest.clear()
            self._append(piece, lines)
        return lines

    def unfinished(self, most: int = 4096) -> bytes:
        """Return the first ``most`` bytes of the line that has begun."""
        return bytes(self._rest[:most]).rstrip(b"\r")

    def close(self) -> list[bytes]:
        """Return what is left at the end of the stream: a line without a newline, if it shows anything."""
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
