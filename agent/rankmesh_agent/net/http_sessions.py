"""Sessions with HTTP servers, shared by all clients of this process: one proof of each server is enough."""

from __future__ import annotations

from rankmesh_agent.net.fork import after_fork
from rankmesh_agent.wire.http_auth import ServerSession

_MAX_SESSIONS = 1 << 12
_sessions: dict[tuple[str, str], ServerSession] = {}
after_fork(_sessions.clear)  # a child that goes on counting would repeat its parent's numbers


def session_with(server: str, credential: str) -> ServerSession:
    """Return the session with a server.

    Args:
        server: its host and port.
        credential: this process's credential.
    """
    if len(_sessions) >= _MAX_SESSIONS:
        _sessions.clear()
    return _sessions.setdefault((server, credential), ServerSession(credential))
