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
from pathlib import Path

import pytest

from rankmesh._launcher.output import LogFile, LogOptions, Outputs, TerminalWriter


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


def written(writer: TerminalWriter, reader: int) -> bytes:
    while writer.pending:
        writer.write_some()
    return os.read(reader, 1 << 16)


def test_a_pipe_gets_finished_lines_only(pipe: tuple[int, int]) -> None:
    writer = TerminalWriter(pipe[1])
    writer.write_lines([b"one", b"two"], "rank 0", b"begun")
    writer.write_lines([], "rank 1", b"begun")
    assert written(writer, pipe[0]) == b"one\ntwo\n"


def test_a_stalled_reader_never_blocks_the_writer(pipe: tuple[int, int]) -> None:
    writer = TerminalWriter(pipe[1])
    writer.write_lines([b"x" * (2 << 20)])
    assert writer.full
    while select.select([], [pipe[1]], [], 0)[1]:
        writer.write_some()
    assert writer.pending


def test_output_nobody_reads_is_dropped() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    writer = TerminalWriter(write_end)
    writer.write_lines([b"line"])
    writer.write_some()
    writer.write_lines([b"line"])
    assert not writer.pending
    os.close(write_end)


def test_a_terminal_redraws_the_newest_unfinished_line_below_the_finished_ones(terminal: tuple[int, int]) -> None:
    screen, output = terminal
    writer = TerminalWriter(output)
    writer.write_lines([], "rank 0", b"[rank 0] 10%")
    writer.write_lines([], "rank 0", b"[rank 0] 20%")
    assert written(writer, screen) == b"[rank 0] 10%\r\x1b[K[rank 0] 20%"
    writer.write_lines([b"[rank 1] hello"], "rank 1")
    assert written(writer, screen) == b"\r\x1b[K[rank 1] hello\n[rank 0] 20%"
    writer.write_lines([b"[rank 0] done"], "rank 0")
    assert written(writer, screen) == b"\r\x1b[K[rank 0] done\n"
    writer.write_lines([b"[rank 1] bye"], "rank 1")
    assert written(writer, screen) == b"[rank 1] bye\n"


def test_a_terminal_gets_no_unfinished_line_that_would_wrap(terminal: tuple[int, int]) -> None:
    screen, output = terminal
    writer = TerminalWriter(output)
    writer.write_lines([], "rank 0", ("ä" * 30).encode())
    assert written(writer, screen) == ("ä" * 19).encode()


@pytest.mark.parametrize(
    ("redirects", "tee", "shown", "expected"),
    [
        ("0", "0", (), ("show", "show", "show", "show")),
        ("3", "0", (), ("file", "file", "file", "file")),
        ("1", "2", (), ("file", "both", "file", "both")),
        ("1:2", "0", (), ("show", "show", "show", "file")),
        ("0:1,1:3", "1:1,7:3", (), ("file", "show", "both", "file")),
        ("0", "0:1", (1,), ("file", "none", "show", "show")),
        ("2", "1", (0, 7), ("both", "file", "file", "file")),
    ],
)
def test_streams_are_shown_or_written_to_files(
    redirects: str, tee: str, shown: tuple[int, ...], expected: tuple[str, ...], tmp_path: Path
) -> None:
    outputs = Outputs(LogOptions(str(tmp_path), redirects, tee, shown), "job")
    kinds = {(True, False): "show", (False, True): "file", (True, True): "both", (False, False): "none"}
    made = [output for local_rank in (0, 1) for output in outputs.of_rank(local_rank, 0)]
    assert tuple(kinds[output.writer is not None, output.file is not None] for output in made) == expected
    for output in made:
        if output.file is not None:
            output.file.close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"no directory can be made in {tmp_path}/file/logs: Not a directory"):
        Outputs(LogOptions(str(tmp_path / "file/logs"), "1"), "job")


def test_a_full_disk_loses_output_of_a_file() -> None:
    file = LogFile("/dev/full")
    file.write(b"line")
    assert file.lost is not None
    file.close()
