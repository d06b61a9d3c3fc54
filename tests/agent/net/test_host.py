"""The identity of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rankmesh_agent.net.host import host_id


def test_the_host_is_that_of_the_shared_directory(tmp_path: Path, monkeypatch):
    shm = tmp_path / "shm"
    shm.mkdir()
    program = f"from rankmesh_agent.net.host import host_id; print(host_id({str(shm)!r}))"
    child = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert host_id(str(shm)) == child.stdout.strip() == host_id(f"{shm}/.") != host_id(str(tmp_path))
    here = host_id(f"{shm}/none")
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    assert host_id(f"{shm}/none") != here, "without the directory a process is alone"
