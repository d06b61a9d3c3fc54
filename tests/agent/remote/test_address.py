"""An agent's unix socket: who finds it, and what becomes of those that killed agents leave."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rankmesh_agent.remote.address import listen, socket_path


def test_its_own_user_finds_it(tmp_path: Path) -> None:
    with listen(str(tmp_path), "a") as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_path(str(tmp_path), "a"))
        listener.accept()[0].close()
        assert os.listdir(tmp_path) == ["rankmesh-agent-a.sock"]
        assert Path(socket_path(str(tmp_path), "a")).stat().st_mode & 0o777 == 0o600


def test_what_killed_agents_leave_is_swept(tmp_path: Path) -> None:
    listen(str(tmp_path), "killed").close()
    with listen(str(tmp_path), "b") as lives, listen(str(tmp_path), "c"):
        assert sorted(os.listdir(tmp_path)) == ["rankmesh-agent-b.sock", "rankmesh-agent-c.sock"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(socket_path(str(tmp_path), "b"))
            lives.accept()[0].close()  # the other agent's look at it
            lives.accept()[0].close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        listen(str(tmp_path / "nowhere"), "a")


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / ("long" * 30)).mkdir()
    with pytest.raises(OSError, match="too long"):
        listen(str(tmp_path / ("long" * 30)), "a")
