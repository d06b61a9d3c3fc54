"""The end of a command: exit codes, the error line on standard error, and closed pipes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from rankmesh_agent.wire.errors import AuthenticationError, DistError
from rankmesh_agent.wire.printable import printable

OK = 0
NEGATIVE = 1
"""A negative result: no such key or group, or an unhealthy job."""
USAGE = 2
"""Invalid command line or environment."""
UNREACHABLE = 3
"""No gateway or agent answers."""
UNAUTHORIZED = 4
"""Missing or wrong token."""
FAILED = 5
"""The operation failed; the reason is on standard error."""
TIMED_OUT = 124
"""Timeout, as in timeout(1)."""
INTERRUPTED = 130
"""Ctrl-C."""
BROKEN_PIPE = 141
"""The reader of standard output has closed it."""

P = ParamSpec("P")


class CommandError(Exception):
    """The error of a command."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Decorate a command: its result becomes the exit code, a CommandError or DistError a line on standard error."""

    @functools.wraps(function)
    def wrapper(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            code = function(*arguments, **options)
        except CommandError as error:
            print_error(str(error))
            code = error.code
        except DistError as error:
            print_error(error.message)
            code = UNAUTHORIZED if isinstance(error, AuthenticationError) else FAILED
        except KeyboardInterrupt:
            code = INTERRUPTED
        raise typer.Exit(code or OK)

    return wrapper


def require_linux() -> None:
    """Check the platform, for a command that starts ranks or serves."""
    try:
        import rankmesh_agent.config.linux  # noqa: F401
    except ImportError as error:
        raise CommandError(str(error), USAGE) from error


def print_error(message: str) -> None:
    """Write a line to standard error."""
    try:
        print(f"rankmesh: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def write(text: str | bytes) -> None:
    """Write to standard output and flush; exit if the reader has closed it."""
    left = memoryview(text.encode(errors="backslashreplace") if isinstance(text, str) else text)
    try:
        sys.stdout.flush()
        while left:  # unbuffered (PYTHONUNBUFFERED), a write may be partial
            left = left[sys.stdout.buffer.write(left) :]
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        discard(1)
        raise typer.Exit(BROKEN_PIPE) from None
    except OSError as error:
        discard(1)
        raise CommandError(f"cannot write to standard output: {error.strerror}") from error


def write_json(document: Any) -> None:
    """Write one indented document to standard output."""
    write(json.dumps(document, indent=2, ensure_ascii=True, default=vars) + "\n")  # dataclasses become objects


def discard(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null, so that later writes, such as at exit, do not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
