"""The launcher's outputs."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import tty
from collections.abc import Iterator

import pytest

from rankmesh._launcher.output import Sink


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """What the user sees, and what the launcher writes to: 20 columns wide."""
    screen, output = pty.openpty()
    tty.setraw(output)
    fcntl.ioctl(output, termios.TIOCSWINSZ, struct.pack("4H", 10, 20, 0, 0))
    yield screen, output
    os.close(screen)
    os.close(output)


def written(sink: Sink, reader: int) -> bytes:
    while sink.pending:
        sink.write_some()
    return os.read(reader, 1 << 16)


def test_a_pipe_gets_finished_lines_only(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    sink.show([b"one", b"two"], "rank 0", b"begun")
    sink.show([], "rank 1", b"begun")
    assert written(sink, pipe[0]) == b"one\ntwo\n"


def test_a_stalled_reader_never_blocks_the_writer(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    sink.show([b"x" * (2 << 20)])
    assert sink.full
    while select.select([], [pipe[1]], [], 0)[1]:
        sink.write_some()
    assert sink.pending


def test_output_nobody_reads_is_dropped() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    sink = Sink(writer)
    sink.show([b"line"])
    sink.write_some()
    sink.show([b"line"])
    assert not sink.pending
    os.close(writer)


def test_a_terminal_redraws_the_newest_unfinished_line_below_the_finished_ones(terminal: tuple[int, int]) -> None:
    screen, output = terminal
    sink = Sink(output)
    sink.show([], "rank 0", b"[rank 0] 10%")
    sink.show([], "rank 0", b"[rank 0] 20%")
    assert written(sink, screen) == b"[rank 0] 10%\r\x1b[K[rank 0] 20%"
    sink.show([b"[rank 1] hello"], "rank 1")
    assert written(sink, screen) == b"\r\x1b[K[rank 1] hello\n[rank 0] 20%"
    sink.show([b"[rank 0] done"], "rank 0")
    assert written(sink, screen) == b"\r\x1b[K[rank 0] done\n"
    sink.show([b"[rank 1] bye"], "rank 1")
    assert written(sink, screen) == b"[rank 1] bye\n"


def test_a_terminal_gets_no_unfinished_line_that_would_wrap(terminal: tuple[int, int]) -> None:
    screen, output = terminal
    sink = Sink(output)
    sink.show([], "rank 0", ("ä" * 30).encode())
    assert written(sink, screen) == ("ä" * 19).encode()
