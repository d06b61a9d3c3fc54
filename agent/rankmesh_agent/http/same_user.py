"""Access to an HTTP port without a token: the processes of this user and of root alone."""

from __future__ import annotations

import socket

from rankmesh_agent.http.middleware import (
    OPEN_PATHS,
    Application,
    Message,
    Receive,
    Send,
    problem_of,
    send_problem,
)
from rankmesh_agent.net.descriptors import DescriptorLimitError, reason
from rankmesh_agent.net.peer_credentials import PeerRefusedError, check_peer, warn_refused
from rankmesh_agent.wire.errors import DistError


class SameUserMiddleware:
    """ASGI middleware that rejects the requests of other users' processes; their health requests get no details.

    The server has ``client_refusal`` of each connection in the requests' state, as ``refusal``: from its begin, as a
    client may close the connection before its request is served.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check a request, then forward it to the application."""
        refusal = scope["state"]["refusal"] if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["path"] in OPEN_PATHS:
            scope["state"]["details"] = False
            await self._app(scope, receive, send)
        else:
            warn_refused(refusal)
            await send_problem(problem_of(refusal), send)


def client_refusal(sock: socket.socket) -> DistError | None:
    """Return why the requests of a connection are rejected, None if they are not."""
    try:
        check_peer(sock)
    except PeerRefusedError as error:
        return error
    except OSError as error:
        return DescriptorLimitError(f"cannot determine the user of the client: {reason(error)}")
    return None
