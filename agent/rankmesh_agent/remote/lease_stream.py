"""Stream that is the lease of an agent: from the request that acquires the agent to its end, for whatever reason."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from rankmesh_agent.agent import Agent
from rankmesh_agent.net.stream import FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.codec import decode, encode, error_data
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.remote.requests import REQUESTS, Acquire, Joined, Release
from rankmesh_agent.remote.session import Session
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Kind
from rankmesh_agent.wire.errors import LeaseEndedError, ProtocolError

_MAX_REASON = 500
"""Characters of a reason."""


class LeaseStream:
    """A stream that acquires the agent: the lease, from then on.

    Args:
        leases: of the agent.
        stream: has brought the lease request.
        request: the lease request.

    Attributes:
        active: the lease.
        session: the session of its process, None before the join and after the end.

    Raises:
        AgentTakenError: the agent is leased already.
    """

    def __init__(self, leases: LeaseManager, stream: FramedStream, request: Acquire) -> None:
        self._leases = leases
        self._stream = stream
        self.session: Session | None = None
        self._send_lock = threading.Lock()
        self._over = False
        # The join takes as long as it takes; meanwhile, ``serve`` detects the end of the client.
        self.active = leases.acquire(request.terms, join_seconds=request.joining, on_end=self._on_end)

    def serve(self) -> None:
        """Keep the lease until the stream ends, or the client releases it."""
        active = self.active
        active.joining.add_done_callback(self._on_joined)
        reason = f"its process ({active.lease.holder}) ended without a goodbye"
        how: dict[str, Any] = {"failed": True}
        try:
            request = decode(REQUESTS, self._stream.receive(None).document)
            if not isinstance(request, Release):
                raise ProtocolError(f"an attached process sent a {type(request).__name__} over its lease's connection")
            reason = request.reason[:_MAX_REASON]
            how = {"raised": request.raised, "exit_text": request.exit_text[:_MAX_REASON]}
        except (StreamClosedError, StreamTimeoutError):
            pass
        finally:
            self._over = True
            self._leases.release(active.lease.id, reason, **how)
            self._close_session()
            wait([active.joining])
        self._respond(Kind.OK)

    def _on_joined(self, joining: Future[Agent]) -> None:
        error = joining.exception()
        if error is not None:
            self._respond(Kind.ERROR, encode(error_data(error)))
            self._stream.shutdown()
            return
        agent = joining.result()
        self.session = Session(agent, partial(self._leases.grow, self.active), self._ended)
        if self._over:  # released before the session was there
            self._close_session()
        self._respond(Kind.OK, encode(Joined.of(agent, self.active.lease.id)))

    def _on_end(self, reason: str) -> None:
        """End the process's streams, after a last response with the reason: the lease has ended."""
        if self._close_session() and not self._over:
            self._respond(Kind.ERROR, encode(error_data(LeaseEndedError(reason))))
            self._stream.shutdown()

    def _ended(self) -> LeaseEndedError | None:
        """Return the error of calls after the agent, and not the process, has ended the lease."""
        reason = "" if self._over else self.active.end_reason
        return LeaseEndedError(reason) if reason else None

    def _close_session(self) -> bool:
        """Close the session; return whether there was one."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
        return session is not None

    def _respond(self, kind: Kind, document: bytes = b"") -> None:
        with self._send_lock, contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._stream.send(attach_frames.encode(kind, document))
