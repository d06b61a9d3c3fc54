"""The unix socket of an agent, and what killed agents have left."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankmesh_agent.remote.address import listen, socket_path


@pytest.fixture
def directory() -> Iterator[str]:
    """A directory with a short path: that of a socket has 107 characters at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield made


def test_an_agent_removes_the_sockets_of_killed_ones(directory: str) -> None:
    alive = listen(directory, "alive")
    listen(directory, "killed").close()
    for name in ("killed-early", "starting"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{socket_path(directory, name)}.new")
    old = time.time() - 100
    os.utime(f"{socket_path(directory, 'killed-early')}.new", (old, old))
    with alive, listen(directory, "new"):
        left = sorted(path.name for path in Path(directory).iterdir())
    assert left == ["rankmesh-agent-alive.sock", "rankmesh-agent-new.sock", "rankmesh-agent-starting.sock.new"]
