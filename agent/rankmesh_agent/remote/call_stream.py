"""Stream for the calls of an attached process, at its agent: one request at a time, in the thread that receives it."""

from __future__ import annotations

import logging
from typing import Any

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import Frame, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.codec import decode, encode, error_data
from rankmesh_agent.remote.requests import REQUESTS
from rankmesh_agent.remote.session import Session
from rankmesh_agent.remote.staging import AgentStream
from rankmesh_agent.store import codec as store_codec
from rankmesh_agent.store import commands
from rankmesh_agent.store.client import failed_wait_error
from rankmesh_agent.store.command import Waiting
from rankmesh_agent.store.store import MARGIN_SECONDS
from rankmesh_agent.wire.attach_frames import Kind
from rankmesh_agent.wire.errors import (
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)

_STORE_SLICE_SECONDS = 0.5
"""Length of one wait at the store, after which the stream is checked: the client may have closed it."""

_log = logging.getLogger("rankmesh")


class CallStream:
    """One stream, and its thread.

    Args:
        session: of the attached process.
        stream: a new one of its streams.
    """

    def __init__(self, session: Session, stream: AgentStream) -> None:
        self._session = session
        self._stream = stream

    def serve(self) -> None:
        """Execute requests until the stream ends."""
        while True:
            try:
                frame = self._stream.receive_request()
                try:
                    kind, document = Kind.OK, self._execute(frame)
                except (StreamClosedError, StreamTimeoutError, ProtocolError):
                    raise
                except Exception as error:
                    kind, document = Kind.ERROR, encode(error_data(self._session.ended() or error))
                self._stream.respond(kind, document)
            except (StreamClosedError, StreamTimeoutError):
                return
            except ProtocolError as error:
                _log.warning("an attached process violates the protocol: %s", error.message)
                return

    def _execute(self, frame: Frame) -> bytes:
        """Return the document of the response to a request."""
        if frame.header.kind == Kind.STORE:
            return store_codec.serve(frame.document, self._execute_command)
        if frame.header.kind != Kind.REQUEST:
            raise ProtocolError(f"an attached process sent an unknown request, {frame.header.kind}")
        result = decode(REQUESTS, frame.document).execute(self._session, self._stream)
        return b"" if result is None else encode(result)

    def _execute_command(self, request: store_codec.Request) -> Any:
        """Execute a command of the job's store."""
        store, command = self._session.store, request.command
        if not isinstance(command, Waiting):
            return store.execute(command, request.timeout)
        deadline, failures = Deadline(command.seconds), len(store.failures)
        while True:
            wait = min(_STORE_SLICE_SECONDS, deadline.remaining())
            margin = deadline.remaining() - wait + MARGIN_SECONDS
            try:
                result = store.execute(command.with_timeout(wait), margin)
            except StoreUnresponsiveError:
                raise
            except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
                if len(store.failures) > failures:  # between two slices
                    raise failed_wait_error(store.failures[failures], error) from None
                if error.ranks or deadline.expired() or self._stream.peer_closed():
                    raise
                continue
            if isinstance(command, commands.QueuePop) and self._stream.peer_closed():
                # The client has gone, so the value goes back to the queue.
                store.undo(command, result)
            return result
