"""Stream that is the lease of an agent: from the request that acquires the agent to its end, for whatever reason."""

from __future__ import annotations

import contextlib
import secrets
import threading
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from rankmesh_agent.agent import Agent
from rankmesh_agent.net.stream import FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.codec import describe_agent, error_to_json
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.remote.session import Session
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistError, LeaseEndedError, ProtocolError
from rankmesh_agent.wire.schemas import LeaseTerms

_MAX_REASON = 500
"""Characters of a reason."""


class LeaseStream:
    """A stream that acquires the agent: the lease, from then on.

    Args:
        leases: of the agent.
        stream: has brought the lease request.
        document: of the request.

    Attributes:
        id: of the lease; no client chooses it, so none can name another's.
        job: its job.
        session: the session of its process, None before the join and after the end.
    """

    def __init__(self, leases: LeaseManager, stream: FramedStream, document: dict[str, Any]) -> None:
        self._leases = leases
        self._stream = stream
        self._document = document
        self.id = secrets.token_hex(16)
        self.job = str(document.get("job", ""))
        self.session: Session | None = None
        self._send_lock = threading.Lock()
        self._over = False

    def end(self, reason: str) -> None:
        """End the process's streams, after a last response with the reason: the lease has ended."""
        if self._close_session() and not self._over:
            with contextlib.suppress(StreamClosedError, StreamTimeoutError):
                self._respond_error(LeaseEndedError(reason))
            self._stream.shutdown()

    def serve(self) -> None:
        """Have the agent join, and keep the lease until the stream ends, or the client releases it."""
        document, stream = self._document, self._stream
        try:
            wanted = LeaseTerms(
                self.job,
                int(document["rank"]),
                int(document["world_size"]),
                float(document["timeout"]),
                str(document["holder"])[:500],
                awaits_growth=bool(document.get("awaits_growth")),
            )
            # The join takes as long as it takes; meanwhile, this thread detects the end of the client.
            _, joining = self._leases.acquire(wanted, self.id, join_seconds=float(document["joining"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError("an attached process sent a malformed lease request") from error
        except DistError as error:
            refuse(stream, error)
            return
        joining.add_done_callback(self._on_joined)
        reason = f"its process ({wanted.holder}) ended without a goodbye"
        how: dict[str, Any] = {"failed": True}
        try:
            frame = stream.receive(None)
            if frame.header.kind != Request.RELEASE:
                raise ProtocolError(f"an attached process sent request {frame.header.kind} over its lease's connection")
            released = attach_frames.decode_json(frame.document)
            reason = str(released.get("reason", ""))[:_MAX_REASON]
            exit_text = str(released.get("exit_text", ""))[:_MAX_REASON]
            how = {"raised": bool(released.get("raised")), "exit_text": exit_text}
        except (StreamClosedError, StreamTimeoutError):
            pass
        finally:
            self._over = True
            self._leases.release(self.id, reason, **how)
            self._close_session()
            wait([joining])
        with contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._send(Response.OK)

    def _on_joined(self, joining: Future[Agent]) -> None:
        error = joining.exception()
        if error is not None:
            with contextlib.suppress(StreamClosedError, StreamTimeoutError):
                self._respond_error(error)
            self._stream.shutdown()
            return
        agent = joining.result()
        self.session = Session(agent, partial(self._leases.grow, self.id), self._ended)
        if self._over:  # released before the session was there
            self._close_session()
        with contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._send(Response.OK, attach_frames.encode_json({"lease": self.id} | describe_agent(agent)))

    def _ended(self) -> LeaseEndedError | None:
        """Return the error of calls after the agent, and not the process, has ended the lease."""
        reason = "" if self._over else self._leases.end_reason(self.id)
        return LeaseEndedError(reason) if reason else None

    def _close_session(self) -> bool:
        """Close the session; return whether there was one."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
        return session is not None

    def _respond_error(self, error: BaseException) -> None:
        self._send(Response.ERROR, attach_frames.encode_json(error_to_json(error)))

    def _send(self, response: Response, document: bytes = b"") -> None:
        with self._send_lock:
            self._stream.send(attach_frames.encode(response, document))


def refuse(stream: FramedStream, error: BaseException) -> None:
    """Send an error in response to the first request of a stream."""
    stream.send(attach_frames.encode(Response.ERROR, attach_frames.encode_json(error_to_json(error))))
