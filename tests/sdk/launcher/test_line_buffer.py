"""Bytes cut into lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh._launcher.output import LineBuffer


def cut(*chunks: bytes) -> list[bytes]:
    cutter = LineBuffer()
    return [line for chunk in chunks for line in cutter.feed(chunk)] + cutter.close()


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"one\ntwo\n\nthree", [b"one", b"two", b"", b"three"]),
        (b"windows\r\nlines\r\n", [b"windows", b"lines"]),
        (b"\r  0%\r 50%\r100%\n", [b"100%"]),
        (b"  0%\r 50%\r100%\r", [b"100%"]),
        (b"\r 50%\r    \rmessage\n\r 60%", [b"message", b" 60%"]),
        (b"\r 50%\r    \r", []),
        (b"\xff\xfe\x00\n\xc3", [b"\xff\xfe\x00", b"\xc3"]),
    ],
)
def test_lines_as_a_terminal_shows_them(stream: bytes, lines: list[bytes]) -> None:
    assert cut(stream) == lines
    assert cut(*(stream[i : i + 1] for i in range(len(stream)))) == lines


@given(st.lists(st.text(alphabet="ab \r\n").map(str.encode)))
def test_how_the_bytes_arrive_does_not_matter(chunks: list[bytes]) -> None:
    assert cut(*chunks) == cut(b"".join(chunks))


@given(st.lists(st.binary().map(lambda line: line.replace(b"\r", b"").replace(b"\n", b""))))
def test_nothing_is_lost_without_carriage_returns(lines: list[bytes]) -> None:
    assert cut(b"".join(line + b"\n" for line in lines)) == lines


def test_the_line_that_has_begun() -> None:
    cutter = LineBuffer()
    cutter.feed(b"done\n 10%\r 20%")
    assert cutter.unfinished() == b" 20%"
    cutter.feed(b"\r")
    assert cutter.unfinished() == b" 20%"
    assert cutter.feed(b"\n") == [b" 20%"]
    assert cutter.unfinished() == b""


def test_a_stream_without_newlines_comes_in_pieces() -> None:
    cutter = LineBuffer(longest=4)
    assert cutter.feed(b"123") == []
    assert cutter.feed(b"456789") == [b"1234", b"5678"]
    assert cutter.feed(b"\n") == [b"9"]
