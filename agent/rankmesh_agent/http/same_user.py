"""Access to an HTTP port without a token: the processes of this user and of root alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from rankmesh_agent.http.middleware import (
    OPEN_PATHS,
    Application,
    Message,
    Receive,
    Send,
    encode_problem,
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


def same_user_handler(handle: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """Return a handler of upgraded connections that closes those of other users' processes."""

    def check_and_handle(sock: socket.socket) -> None:
        try:
            check_peer(sock)
        except PeerRefusedError as error:
            warn_refused(error)
            with contextlib.suppress(OSError):
                headers, body = encode_problem(problem_of(error))
                lines = [b"HTTP/1.1 403 Forbidden", *(b": ".join(field) for field in headers), b"", body]
                sock.send(b"\r\n".join(lines), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            sock.close()
        else:
            handle(sock)

    return check_and_handle


def client_refusal(sock: socket.socket) -> DistError | None:
    """Return why the requests of a connection are rejected, None if they are not."""
    try:
        check_peer(sock)
    except PeerRefusedError as error:
        return error
    except OSError as error:
        return DescriptorLimitError(f"cannot determine the user of the client: {reason(error)}")
    return None
