"""A test's function in a process of another user."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

OTHER_USER = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
"""Marks a test that uses ``as_other_user``."""


def as_other_user(body: Callable[[], Any], seconds: int = 20) -> Any:
    """Return what ``body`` returns, as JSON has it, in a process of another user; an exception as its text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(seconds)
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            try:
                result = body()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    assert content, f"no result within {seconds} s"
    return json.loads(content)
