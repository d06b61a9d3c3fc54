"""Uvicorn's HTTP protocol with limits of time, of heads and of connections."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rankmesh_agent.http.acceptor import HEAD_SECONDS
from rankmesh_agent.http.middleware import encode_problem, problem
from rankmesh_agent.http.same_user import client_refusal
from rankmesh_agent.net.admission import IDLE, Admission, ConnectionLimit
from rankmesh_agent.wire.schemas import Problem

ProtocolFactories = Mapping[bytes, Callable[[Callable[[Exception | None], object]], asyncio.Protocol]]
"""By the first bytes of a connection that is not HTTP: makes its protocol, given a function to call at its end."""
BODY_SECONDS = 20.0
"""Seconds that a request's body may be late: each _MIN_BODY_BYTES_A_SECOND that come make up for one."""
_MIN_BODY_BYTES_A_SECOND = 16 << 10
MAX_HEAD_BYTES = 64 << 10
"""Limit of a request's head, and so of its URL."""


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # the base depends on what is installed
    """Uvicorn's protocol, with limits of the time and the connections that wait for their clients.

    Attributes:
        protocols: the protocols of connections that are not HTTP.
        same_user: whether requests are for SameUserMiddleware.
        admission: the connection's place among those that wait for their clients.
    """

    protocols: ProtocolFactories = MappingProxyType({})
    same_user = False
    app_state: dict[str, Any]
    cycle: Any
    flow: Any
    transport: Any
    server_state: Any
    _head: bytes = b""
    _head_bytes = 0
    _is_http = False
    admission: Admission | None = None
    _deadline = math.inf
    _awaits_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.same_user:
            self.app_state = {**self.app_state, "refusal": client_refusal(transport.get_extra_info("socket"))}
        self._deadline = time.monotonic() + HEAD_SECONDS
        if self.admission is not None:
            self.admission.renew()  # it may have completed the handshake of TLS

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_http:
            self._head += data
            for preface, make in self.protocols.items():
                if self._head.startswith(preface):
                    self._change_protocol(make)
                    return
                if preface.startswith(self._head):
                    return
            data, self._head, self._is_http = self._head, b"", True
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._head_bytes += len(data)
        super().data_received(data)
        if self.cycle is not cycle:
            self._head_bytes = 0
        elif self._head_bytes >= MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")  # h11 has a limit of its own, httptools has none
        self._update_wait(len(data))

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
        self._refuse(refusal)

    def _refuse(self, refusal: Problem) -> None:
        """Respond with a problem document, and close the connection."""
        headers, body = encode_problem(refusal)
        lines = (
            b": ".join(field) for field in (*headers, *self.server_state.default_headers, (b"connection", b"close"))
        )
        start = f"HTTP/1.1 {refusal.status} {refusal.title}".encode()
        self.transport.write(b"\r\n".join([start, *lines, b"", body]))
        self.transport.close()

    def on_message_complete(self) -> None:
        """Note the end of a body that the application did not read; called by httptools."""
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_wait(0)

    def close_if_late(self, now: float) -> None:
        """Close the connection if the client has not sent its part in time, with a response if that is a body."""
        if now <= self._deadline:
            return
        if self.flow.read_paused:  # the application has to read what has come
            self._deadline = now + BODY_SECONDS
        elif self._awaits_body and not self.cycle.response_started and not self.transport.is_closing():
            text = (
                f"the request's body has not come: send it without pauses of {BODY_SECONDS:g} s, and at "
                f"{_MIN_BODY_BYTES_A_SECOND >> 10} KiB a second or more"
            )
            self._refuse(problem(HTTPStatus.REQUEST_TIMEOUT, "body-timeout", text, retryable=True))
        else:
            self.transport.abort()

    def _change_protocol(self, make: Callable[[Callable[[Exception | None], object]], asyncio.Protocol]) -> None:
        self._end_wait()
        protocol = make(super().connection_lost)  # uvicorn closes and forgets the connection like its own
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(self._head)

    def _update_wait(self, received: int) -> None:
        """Begin, continue or end to wait for the client, after a number of bytes or a response."""
        cycle = self.cycle
        if cycle is None or self.transport.is_closing():
            return
        if cycle.response_complete:
            if not received:
                self._wait(IDLE, math.inf)  # uvicorn limits this time
            elif self._deadline == math.inf:
                self._deadline = time.monotonic() + HEAD_SECONDS
        elif not cycle.more_body:
            self._end_wait()
        elif not self._awaits_body:
            self._wait(IDLE, BODY_SECONDS)
            self._awaits_body = True
        else:
            limit = time.monotonic() + BODY_SECONDS
            self._deadline = min(limit, self._deadline + received / _MIN_BODY_BYTES_A_SECOND)

    def _wait(self, limit: ConnectionLimit, seconds: float) -> None:
        self._end_wait()
        self._deadline = time.monotonic() + seconds
        self.admission = limit.admit(self.transport.get_extra_info("socket"))

    def _end_wait(self) -> None:
        if self.admission is not None:
            self.admission.end()
        self.admission, self._deadline, self._awaits_body = None, math.inf, False


def protocol_with(same_user: bool, protocols: ProtocolFactories = MappingProxyType({})) -> type[asyncio.Protocol]:
    """Return the protocol class of a server with these attributes."""
    return type("ServerProtocol", (LimitedProtocol,), {"same_user": same_user, "protocols": protocols})
