"""Uvicorn's HTTP protocol with limits of heads and of the connections that wait for their clients."""

from __future__ import annotations

import asyncio
import math
import time
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rankmesh_agent.http.acceptor import HEAD_SECONDS
from rankmesh_agent.http.middleware import encode_problem, problem
from rankmesh_agent.net.admission import Admission, ConnectionLimit

MAX_HEAD_BYTES = 64 << 10
"""Limit of a request's head, and so of its URL."""


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # the base depends on what is installed
    """Uvicorn's protocol, with limits of heads and of the connections that wait for their clients.

    ``admission`` is the connection's place until its first request, and ``idle`` the limit of those that wait later.
    """

    cycle: Any
    transport: Any
    server_state: Any

    def __init__(self, admission: Admission, idle: ConnectionLimit, **options: Any) -> None:
        super().__init__(**options)
        self._admission = admission
        self._idle = idle
        self._head_bytes = 0
        self._deadline = math.inf

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._deadline = time.monotonic() + HEAD_SECONDS
        self._admission.renew()  # it may have completed the handshake of TLS

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._head_bytes += len(data)
        super().data_received(data)
        if self.cycle is not cycle:
            self._head_bytes = 0
        elif self._head_bytes >= MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")  # httptools has no limit
        cycle = self.cycle
        if cycle is None or not cycle.response_complete:
            self._update_wait()
        elif self._deadline == math.inf:
            self._deadline = time.monotonic() + HEAD_SECONDS

    def on_message_complete(self) -> None:
        """Note the end of a body that the application did not read; called by httptools."""
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_wait()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request with a problem document; end the connection in the middle of a response."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        if self._head_bytes >= MAX_HEAD_BYTES:
            text = f"the head of the request is over the limit of {MAX_HEAD_BYTES} bytes"
            refusal = problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head-too-large", text)
        else:
            refusal = problem(HTTPStatus.BAD_REQUEST, "bad-request", "this is not an HTTP/1.1 request")
        headers, body = encode_problem(refusal)
        fields = (*headers, *self.server_state.default_headers, (b"connection", b"close"))
        start = f"HTTP/1.1 {refusal.status} {refusal.title}".encode()
        self.transport.write(b"\r\n".join([start, *(b": ".join(field) for field in fields), b"", body]))
        self.transport.close()

    def close_if_late(self, now: float) -> None:
        """Close the connection if its client has not sent a whole head in time."""
        if now > self._deadline:
            self.transport.abort()

    def _update_wait(self) -> None:
        """Note whether the connection waits for its client; other than for a head, its time is limited elsewhere."""
        cycle = self.cycle
        if cycle is None or self.transport.is_closing():
            return
        self._admission.end()
        self._deadline = math.inf
        if cycle.response_complete or cycle.more_body:
            self._admission = self._idle.admit(self.transport.get_extra_info("socket"))
