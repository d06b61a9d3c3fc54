"""Proof of the credential for clients on httpx: ``wire.http_auth.exchange`` in httpx's requests. No I/O."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from rankmesh_agent.net.http_sessions import session_with
from rankmesh_agent.wire.http_auth import HELLO_METHOD, HELLO_TARGET, INFO, ReceivedResponse, exchange


def prove(request: httpx.Request, token: str) -> Generator[httpx.Request, tuple[httpx.Response, bytes], bool]:
    """Yield the requests to send, and receive each response with its body; see ``exchange`` for the result.

    Args:
        request: the caller's request, which gets its proof.
        token: the credential; not empty.

    Raises:
        MissingProofError: a response is not the server's.
    """
    url, host = request.url, request.headers.get("host", "")
    session = session_with(url.netloc.decode("ascii"), token)
    target = url.raw_path.decode("ascii")
    script = exchange(session, request.method, target, host, request.headers, request.content)
    step = next(script)
    while True:
        sent = request
        if not step.own:
            hello = url.copy_with(raw_path=HELLO_TARGET.encode())
            sent = httpx.Request(HELLO_METHOD, hello, headers={"host": host}, extensions=request.extensions)
        sent.headers["authorization"] = step.authorization
        response, body = yield sent
        found = response.headers
        received = ReceivedResponse(response.status_code, found.get("WWW-Authenticate", ""), found.get(INFO, ""), body)
        try:
            step = script.send(received)
        except StopIteration as end:
            return bool(end.value)
