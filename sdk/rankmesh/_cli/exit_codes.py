"""How a command ends: its exit code, one line on standard error, and a reader who has gone."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

DONE = 0
NO = 1
"""The answer is no: there is no such key or group, or something is not as it should be."""
USAGE = 2
"""The command line or the environment makes no sense."""
NOBODY = 3
"""Nobody answers: no gateway, no agent."""
REFUSED = 4
"""The token is missing or wrong."""
FAILED = 5
"""It was asked for and could not be done; the line on standard error says why."""
TIMED_OUT = 124
"""The time was over, as timeout(1) says it."""
INTERRUPTED = 130
"""Ctrl-C."""
READER_GONE = 141
"""Whoever read standard output has closed it."""

P = ParamSpec("P")


class CommandError(Exception):
    """A command cannot do what it was asked to.

    Args:
        message: what happened, where, and what to do, in one line.
        code: the exit code.
    """

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def reporting(command: Callable[P, int | None]) -> Callable[P, None]:
    """Return a command that ends with the exit code the given one returns, and says why in a line if it fails."""

    @functools.wraps(command)
    def reported(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            code = command(*arguments, **options)
        except CommandError as error:
            complain(str(error))
            code = error.code
        except KeyboardInterrupt:
            code = INTERRUPTED
        raise typer.Exit(code or DONE)

    return reported


def complain(message: str) -> None:
    """Write a line to standard error."""
    try:
        print(f"rankmesh: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        _let_go(2)


def write(text: str | bytes) -> None:
    """Write all of it to standard output at once; end if nobody reads it any more."""
    left = memoryview(text.encode(errors="backslashreplace") if isinstance(text, str) else text)
    try:
        sys.stdout.flush()
        while left:  # without a buffer (PYTHONUNBUFFERED) a part may be written
            left = left[sys.stdout.buffer.write(left) :]
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _let_go(1)
        raise typer.Exit(READER_GONE) from None
    except OSError as error:
        _let_go(1)
        raise CommandError(f"cannot write to standard output: {error.strerror}") from error


def _let_go(descriptor: int) -> None:
    """Have nothing fail any more that is still to be written there, at the interpreter's end for one."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
