"""The unix socket of an agent: its path and mode, and the removal of those of killed agents."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rankmesh_agent.remote.address import listen, socket_path


def test_a_client_connects_by_the_agents_id(tmp_path: Path) -> None:
    with listen(str(tmp_path), "a") as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_path(str(tmp_path), "a"))
        listener.accept()[0].close()
        assert os.listdir(tmp_path) == ["rankmesh-agent-a.sock"]
        assert Path(socket_path(str(tmp_path), "a")).stat().st_mode & 0o777 == 0o600


def test_sockets_of_killed_agents_are_removed(tmp_path: Path) -> None:
    listen(str(tmp_path), "killed").close()
    with listen(str(tmp_path), "b") as lives, listen(str(tmp_path), "c"):
        assert sorted(os.listdir(tmp_path)) == ["rankmesh-agent-b.sock", "rankmesh-agent-c.sock"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(socket_path(str(tmp_path), "b"))
            lives.accept()[0].close()  # the other agent's probe
            lives.accept()[0].close()


@pytest.mark.parametrize(("folder", "error"), [("nowhere", "No such file"), ("long" * 30, "too long")])
def test_a_path_without_a_socket(tmp_path: Path, folder: str, error: str) -> None:
    (tmp_path / ("long" * 30)).mkdir()
    with pytest.raises(OSError, match=error):
        listen(str(tmp_path / folder), "a")
