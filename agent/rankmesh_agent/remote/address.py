"""Unix socket of an agent, at a path that its clients derive from the agent's id."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import time

from rankmesh_agent.net.fork import close_in_children

_BACKLOG = 128
_BIND_SECONDS = 60.0
"""Age after which a socket that is bound but does not listen is a killed agent's."""


def socket_path(directory: str, agent_id: str) -> str:
    """Return the path of the unix socket of an agent, in its RANKMESH_SHM_DIR."""
    return f"{directory}/rankmesh-agent-{agent_id}.sock"


def listen(directory: str, agent_id: str) -> socket.socket:
    """Return a listening socket at an agent's path, for its own user alone; remove those of agents that were killed."""
    _remove_stale(directory)
    path = socket_path(directory, agent_id)
    listener = close_in_children(socket.socket(socket.AF_UNIX))
    try:
        # It gets its name when it listens: a name that refuses connections is a killed agent's.
        listener.bind(f"{path}.new")
        os.chmod(f"{path}.new", 0o600)
        listener.listen(_BACKLOG)
        os.rename(f"{path}.new", path)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(directory: str) -> None:
    pattern = socket_path(glob.escape(directory), "*")
    for path in glob.glob(f"{pattern}.new"):
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(path).st_mtime > _BIND_SECONDS:
                os.unlink(path)
    for path in glob.glob(pattern):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
